"""The fields of zip archives, for whoever reads or writes them: layouts, signatures' fixed parts, flags.

All numbers are little-endian. Source: PKWARE's APPNOTE, 4.3.7 to 4.3.16.
"""

from __future__ import annotations

import struct

LOCAL = struct.Struct("<4sHHHHHIIIHH")
"""Before an entry's name, extra field and content."""
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
"""An entry in the directory at the archive's end."""
END64 = struct.Struct("<4sQHHIIQQQQ")
"""The end of the directory, in 64 bits."""
LOCATOR64 = struct.Struct("<4sIQI")
"""Where `END64` stands."""
END = struct.Struct("<4sHHHHIIH")
"""The end of the archive, before its comment."""
DESCRIPTOR = b"PK\x07\x08"
"""Begins what follows a streamed entry: its CRC and sizes."""
STREAMED = 0x0008
"""Flag: CRC and sizes follow the content."""
UTF8 = 0x0800
"""Flag: the name is UTF-8."""
WIDE = 0xFFFFFFFF
"""In the place of a number that needs 64 bits."""
