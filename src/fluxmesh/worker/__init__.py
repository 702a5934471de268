"""The processes that run jobs, and the one above them that proves their deaths."""
