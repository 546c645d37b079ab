"""Compile the C++ kernels into the wheel, where there is a C++ compiler and a Linux on x86-64 or 64-bit Arm.

The wheel is then one for that platform, and needs no compiler where it is installed. Without a compiler, or with
TRIOLET_PURE_WHEEL=1, it is one for every platform, which compiles the kernels at first use. An editable install brings
nothing: its sources may change.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PURE = "TRIOLET_PURE_WHEEL"
"""Environment variable: 1 leaves compiling to the first use; 0 makes it an error not to compile."""

# In a process of its own: the sources to be packed are not those of a triolet that may be installed. `triolet` is an
# empty package here, for the engine is not needed, nor what it needs.
_COMPILE = """
import sys, types
from pathlib import Path

package = types.ModuleType("triolet")
package.__path__ = [sys.argv[1]]
sys.modules["triolet"] = package
from triolet.kernels.cpu.build import SHIPPED, BuildError, build_shipped

try:
    for path in build_shipped(Path(sys.argv[2])):
        print(f"triolet/kernels/cpu/{SHIPPED}/{path.name}")
except BuildError as error:
    sys.exit(str(error))
"""


class KernelsHook(BuildHookInterface):  # type: ignore[misc]
    """See the module."""

    PLUGIN_NAME = "custom"
    _folder = ""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the compiled kernels to a wheel, and say which platform it is for."""
        wish = os.environ.get(PURE, "")
        if version == "editable" or wish == "1":
            return
        reason = self._compile(build_data)
        if reason and wish == "0":
            raise RuntimeError(f"{PURE} is 0: {reason}")
        if reason:
            self.app.display_warning(f"the wheel brings no compiled kernels: {reason}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled; it is in the wheel."""
        if self._folder:
            shutil.rmtree(self._folder)

    def _compile(self, build_data: dict[str, Any]) -> str:
        """Why it could not be done; empty, if it was."""
        self._folder = tempfile.mkdtemp()
        command = [sys.executable, "-c", _COMPILE, self.root, self._folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["the compiler was stopped"])[-1]
        for name in done.stdout.split():
            build_data["force_include"][str(Path(self._folder) / Path(name).name)] = name
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"
        return ""
