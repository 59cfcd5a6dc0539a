"""How the servers that are Java programs are run."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from tests.servers.process import ServerUnavailable

JAVA_VERSION_MIN = 17
JARS = Path(__file__).resolve().parents[2] / ".servers"


@cache
def find_java() -> str:
    """The path of a Java new enough for the servers."""
    java = shutil.which("java")
    if java is None:
        raise ServerUnavailable("no Java on the PATH: run `make servers` as root")
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
    version = re.search(r'version "(\d+)', answer)
    if version is None or int(version[1]) < JAVA_VERSION_MIN:
        raise ServerUnavailable(f"{java} is older than Java {JAVA_VERSION_MIN}: run `make servers` as root")
    return java


def find_jars(server: str) -> Path:
    """The folder of the server's jars, which tests/servers/install fills."""
    # The stamp is written last.
    if not (JARS / server / "stamp").exists():
        raise ServerUnavailable(f"no jars in {JARS / server}: run `make servers`")
    return JARS / server / "lib"


def java_command(java: str, jars: Path, temporary: Path, heap_megabytes: int, *main: str) -> list[str]:
    """The command that runs a main class and its arguments in a small Java machine that starts fast."""
    return [
        java,
        f"-Xmx{heap_megabytes}m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-XX:-UsePerfData",
        # A killed server leaves the libraries there that it unpacked.
        f"-Djava.io.tmpdir={temporary}",
        "-Dorg.slf4j.simpleLogger.showDateTime=true",
        "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
        "-cp",
        f"{jars}/*",
        *main,
    ]
