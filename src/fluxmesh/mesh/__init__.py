"""Workers that know each other: who is there, what they carry, where a key belongs.

The core (`member`, `messages`, `effects`, `wire`, `seal`, `detector`, `gossip`, `swim`, `ring`) is pure:
bytes, timers and commands in, effects out. It owns no socket, clock, thread or source of chance; `node` is
the shell around it.
"""
