"""Stand-ins for the public base images where no image registry can be reached: Debian's packages under the images' names.

Dockerfile and compose file stay as they are. What a stand-in has in common with its original is what ours rely on.
"""

import functools
import http.server
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tests.compose.docker_engine import Docker

logger = logging.getLogger(__name__)

STAND_INS = Path(__file__).with_name("stand_ins")
PUBLIC = {"debian:bookworm-slim": "debian", "redis:7.2.7-bookworm": "redis", "nginx:1.28.0-bookworm": "nginx"}
"""Public image → the Dockerfile in stand_ins that takes its place. In this order, because each is made from the ones before."""
ROOTFS = "headrace-stand-in/rootfs"
PORT_LABEL = "headrace.wheels.port"
PULL_TIMEOUT_S = 120
SLIM = (
    ("etc/apt/apt.conf.d/docker-clean", 'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin"; };\n'),
    (
        "etc/dpkg/dpkg.cfg.d/docker",
        "path-exclude /usr/share/doc/*\npath-exclude /usr/share/man/*\npath-exclude /usr/share/locale/*\n",
    ),
)
"""What Debian's published image sets, so that its descendants stay as small."""


@contextmanager
def base_images(docker: Docker, folder: Path) -> Iterator[None]:
    """Every public image is there: pulled, or a stand-in. Meanwhile builds can install wheels of this machine's folders."""
    with _wheel_server(docker, local_folders(pip_settings())) as wheels:
        for image, name in PUBLIC.items():
            if docker.has_image(image) and (wheels is None or docker.label(image, PORT_LABEL) in ("", str(wheels))):
                continue
            if not docker.succeeds("pull", "--quiet", image, timeout_s=PULL_TIMEOUT_S):
                _make(docker, image, name, folder, wheels)
        yield


def pip_settings() -> dict[str, str]:
    """pip's settings on this machine, from its files and variables."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    return parse_pip_settings(listed.splitlines())


def parse_pip_settings(lines: Iterable[str]) -> dict[str, str]:
    """`global.index-url='https://…'` and `:env:.index-url='…'` → index-url. Variables come last and win."""
    entries = [line.partition("=") for line in sorted(lines, key=lambda line: line.startswith(":env:")) if "=" in line]
    return {key.rpartition(".")[2]: value.strip("'\"") for key, _, value in entries}


def local_folders(settings: Mapping[str, str]) -> list[Path]:
    """The folders of this machine in which pip looks for wheels."""
    return [Path(entry) for entry in settings.get("find-links", "").split() if Path(entry).is_dir()]


def container_pip_conf(settings: Mapping[str, str], find_links: Iterable[str]) -> str:
    """The settings that hold inside a container too: addresses of indexes, and where this machine's wheels are served."""
    lines = ["[global]"]
    for key in ("index-url", "extra-index-url", "trusted-host"):
        values = [value for value in settings.get(key, "").split() if not value.startswith("file:")]
        lines += [f"{key} = {' '.join(values)}"] if values else []
    if urls := list(find_links):
        hosts = sorted({url.split("/")[2].partition(":")[0] for url in urls})
        lines += [f"find-links = {' '.join(urls)}", f"trusted-host = {' '.join(hosts)}"]
    return "\n".join(lines) + "\n"


@contextmanager
def _wheel_server(docker: Docker, folders: list[Path]) -> Iterator[int | None]:
    """Serves `folders` to containers; its port, None if there is nothing to serve."""
    if not folders:
        with nullcontext():
            yield None
        return
    folder = folders[0]  # pip seldom has more.
    handler = functools.partial(_QuietHandler, directory=folder)
    with _listen(docker.bridge_address(), docker.label("debian:bookworm-slim", PORT_LABEL), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def _listen(address: str, earlier_port: str, handler) -> http.server.ThreadingHTTPServer:
    """On the port that an earlier stand-in knows, so that what was built from it stays cached; else on one the system picks."""
    try:
        return http.server.ThreadingHTTPServer((address, int(earlier_port or 0)), handler)
    except OSError:
        return http.server.ThreadingHTTPServer((address, 0), handler)


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def _make(docker: Docker, image: str, name: str, folder: Path, wheels: int | None) -> None:
    logger.info("%s cannot be pulled; making a stand-in of Debian's packages", image)
    context = folder / name
    shutil.copytree(STAND_INS, context)
    if name == "debian":
        if not docker.has_image(ROOTFS):
            _import_rootfs(docker, folder / "rootfs")
        _copy_certificates(context / "certificates")
        links = [f"http://{docker.bridge_address()}:{wheels}/"] if wheels else []
        (context / "pip.conf").write_text(container_pip_conf(pip_settings(), links))
    labels = ("--label", f"{PORT_LABEL}={wheels or ''}")
    docker.run("build", "--quiet", "--tag", image, *labels, "--file", str(context / f"{name}.Dockerfile"), str(context))


def _import_rootfs(docker: Docker, rootfs: Path) -> None:
    subprocess.run(
        ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", str(rootfs)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    for path, content in SLIM:
        (rootfs / path).write_text(content)
    for path in ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists"):
        for entry in (rootfs / path).iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    with subprocess.Popen(["tar", "-C", str(rootfs), "-c", "."], stdout=subprocess.PIPE) as archive:
        docker.run("import", "-", ROOTFS, stdin=archive.stdout)
    shutil.rmtree(rootfs)


def _copy_certificates(folder: Path) -> None:
    """Authorities that this machine trusts beside Debian's, without which a proxy of its network would be refused."""
    own = Path("/usr/local/share/ca-certificates")
    shutil.copytree(own, folder) if own.is_dir() else folder.mkdir()
