"""The command line. One noun a file; a command's module is imported only when that command is asked for."""
