"""The shell of the mesh: real sockets, real threads, real processes."""
