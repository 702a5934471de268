"""The storage port and its backends. A backend is loaded by its URL's scheme, never imported by name."""
