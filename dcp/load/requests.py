"""How much readers ask storage for at once. Numbers alone, so that forecasts count by them without torch."""

from __future__ import annotations

SMALL = 1 << 20
"""Records up to this many bytes are read whole if all of the chunk is needed."""
TINY = 64 << 10
"""Records up to this many bytes are read whole whatever is needed of them."""
REQUEST = 8 << 20
"""Most bytes near ranges are joined into. Larger blocks also cost a fresh mapping of memory each."""
GAP = 64 << 10
"""Bytes not needed that are read rather than asked around."""
GROUP = 32 << 20
"""Bytes handed to the planner before the next are taken."""
