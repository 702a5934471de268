"""The REST door: every verb over HTTP, as JSON, with problems as RFC 9457 has them."""
