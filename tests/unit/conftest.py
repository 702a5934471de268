from __future__ import annotations

from hypothesis import settings

# A machine that is busy with other tests must not fail one for being slow.
settings.register_profile("fluxmesh", deadline=None)
settings.load_profile("fluxmesh")
