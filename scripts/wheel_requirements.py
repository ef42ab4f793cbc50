"""Print what a wheel needs, without its extras and without the packages named: a requirements file for pip.

vLLM's CPU wheel asks for torchaudio, torchvision and torchcodec, which text models don't use and whose builds on PyPI
bring another torch and its CUDA packages.

    python wheel_requirements.py WHEEL [PACKAGE_TO_LEAVE_OUT ...]
"""

import email
import re
import sys
import zipfile

wheel, left_out = sys.argv[1], {name.lower() for name in sys.argv[2:]}
with zipfile.ZipFile(wheel) as file:
    metadata = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
    message = email.message_from_bytes(file.read(metadata))
for line in message.get_all("Requires-Dist") or []:
    requirement, _, marker = line.partition(";")
    name = re.match(r"[\w.-]+", requirement.strip())
    assert name is not None, line
    if "extra" not in marker and name.group().lower() not in left_out:
        print(line)
