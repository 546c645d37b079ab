"""The keyboard's mode, where there is none."""

from __future__ import annotations

import subprocess
import sys

ON_WINDOWS = """
import sys
import triolet.cli

sys.platform = "win32"
sys.modules.update(termios=None, tty=None)
from triolet.cli.terminal import KeyboardMode, quiet_keyboard

with quiet_keyboard():
    KeyboardMode.current().restore()
print(KeyboardMode.current())
"""


def test_without_termios_there_is_no_keyboard_mode_to_go_back_to() -> None:
    ran = subprocess.run([sys.executable, "-c", ON_WINDOWS], capture_output=True, text=True, check=True)
    assert ran.stdout == "KeyboardMode(attributes=None)\n"
