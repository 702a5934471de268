"""The fast storage for a fleet: one Redis or Valkey server, any number of machines."""
