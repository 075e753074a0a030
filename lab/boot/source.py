"""Kernels of our own for QEMU: Debian's source, a small configuration, and the first patches of a series.

One tree serves all variants of a configuration, so a variant costs a rebuild of what its patches touch. What a run needs of a
variant (kernel, headers, the tree's selftests) lies apart, under a name that changes with the patches.
"""

import dataclasses
import glob
import hashlib
import importlib.util
import os
import shutil
import subprocess

from .debian import Archive
from .outcome import Missing

HERE = os.path.dirname(os.path.abspath(__file__))
SERIES = os.path.join(os.path.dirname(os.path.dirname(HERE)), "kernel", "devmem")
# Parallel jobs: fewer than the host could run, because a person who waits for a kernel works on.
JOBS = 2
# Length of the part of a kernel's name that changes with its patches.
DIGITS = 12
TOOLS = {
    "gcc": "gcc",
    "make": "make",
    "flex": "flex",
    "bison": "bison",
    "bc": "bc",
    "xz": "xz-utils",
    "git": "git",
    "depmod": "kmod",
    "rsync": "rsync",
}
# Of a library, for objtool.
HEADER, HEADER_OF = "/usr/include/gelf.h", "libelf-dev"
# The kernel's selftests that need a NIC, and the directories that they are built from and run with.
SELFTESTS = ["tools/testing/selftests/drivers/net", "tools/testing/selftests/net/lib", "tools/testing/selftests/net/lib.sh"]
WITH_SELFTESTS = ["tools/testing/selftests/kselftest", "tools/net/ynl", "Documentation/netlink/specs", "usr/include"]
YNL = "tools/net/ynl"
HARDWARE = "tools/testing/selftests/drivers/net/hw"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kernel of our own."""

    patches: int | None  # how many of the series it has; None: all
    sanitized: bool = False  # with what watches over memory and locks
    planted: bool = False  # with bugs, which that must report

    def series(self):
        """Its patches, in order."""
        own = [os.path.join(SERIES, "planted-bugs.patch")] if self.planted else []
        return sorted(glob.glob(os.path.join(SERIES, "00*.patch")))[: self.patches] + own

    def configs(self):
        """The files that make up its configuration."""
        return [os.path.join(SERIES, name) for name in ("config", *(["config-sanitize"] if self.sanitized else []))]


def built(cache, suite, package, name, variant, one_at_a_time):
    """The directory of the variant called `name`: complete or not there at all."""
    digest = hashlib.sha256(package.encode())
    for path in [*variant.configs(), *variant.series()]:
        with open(path, "rb") as file:
            digest.update(file.read())
    place = os.path.join(cache, "kernels", f"{name}-{digest.hexdigest()[:DIGITS]}")
    if os.path.isdir(place):
        return place
    for tool, of in TOOLS.items():
        if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            raise Missing(f"{tool} (package {of}: {name} is built from Debian's source)")
    if not os.path.exists(HEADER):
        raise Missing(f"{HEADER} (package {HEADER_OF}: {name} is built from Debian's source)")
    if importlib.util.find_spec("yaml") is None:
        raise Missing(f"the Python module yaml (package python3-yaml: the selftests of {name} are built with it)")
    with one_at_a_time(package):
        if not os.path.isdir(place):
            tree = _tree(cache, suite, package)
            if variant.sanitized:
                tree = _copy(tree, f"{tree}-sanitize")
            _build(tree, variant, name, place)
            for old in glob.glob(os.path.join(cache, "kernels", f"{name}-{'[0-9a-f]' * DIGITS}*")):
                if old != place:
                    shutil.rmtree(old)
    return place


def _tree(cache, suite, package):
    """The unpacked source, as a git repository, so that any state of it is one command away from the first."""
    tree = os.path.join(cache, "trees", package)
    if not os.path.isdir(tree):
        archive = Archive(cache, suite)
        archive.refresh()
        print(f"lab: unpacking {package}, once", flush=True)
        partial = f"{tree}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        os.makedirs(f"{partial}/source")
        archive.unpack([package], partial)
        _run(["tar", "-xf", f"{partial}/usr/src/{package}.tar.xz", "-C", f"{partial}/source", "--strip-components=1"], partial)
        for command in (["init", "-q"], ["add", "--all", "--force"], [*_NOBODY, "commit", "-q", "-m", package]):
            _run(["git", *command], f"{partial}/source")
        os.rename(f"{partial}/source", tree)
        shutil.rmtree(partial)
    return tree


# git must not tidy up the repository in the background.
_NOBODY = ["-c", "user.name=lab", "-c", "user.email=lab@localhost", "-c", "gc.auto=0"]


def _copy(tree, other):
    """Another tree of the same source, for another configuration: each keeps its objects."""
    if not os.path.isdir(other):
        shutil.rmtree(f"{other}.partial", ignore_errors=True)
        _run(["git", "clone", "-q", tree, f"{other}.partial"], tree)
        os.rename(f"{other}.partial", other)
    return other


def _build(tree, variant, name, place):
    print(f"lab: building {name}, once: a quarter of an hour for the first, a minute or two for its variants", flush=True)
    compiler = ["CC=ccache gcc"] if shutil.which("ccache") else []
    # LOCALVERSION is set to nothing. Otherwise a tree under git adds a plus to the release.
    make = ["nice", "-n", "10", "make", "-s", f"-j{JOBS}", "LOCALVERSION=", *compiler]
    _run(["git", "reset", "-q", "--hard"], tree)
    # A build that was stopped may leave files of a patch that the index no longer knows.
    touched = _run(["git", "apply", "--numstat", *Variant(None).series()], tree).split("\n")
    _run(["git", "clean", "-fqx", "--", *(line.split("\t")[2] for line in touched if line)], tree)
    if variant.series():
        _run(["git", "apply", "--index", *variant.series()], tree)
    partial = f"{place}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    os.makedirs(f"{partial}/boot")
    with open(f"{partial}/allconfig", "wb") as wanted:
        for path in variant.configs():
            with open(path, "rb") as file:
                shutil.copyfileobj(file, wanted)
    _run([*make, f"KCONFIG_ALLCONFIG={partial}/allconfig", "allnoconfig"], tree)
    _run([*make, "bzImage", "modules"], tree)
    _run([*make, f"INSTALL_MOD_PATH={partial}", "modules_install"], tree)
    _run([*make, "headers_install"], tree)
    # The netlink families that ncdevmem and the lab's own clients speak.
    _run([*make, "-C", YNL, "GENS=netdev ethtool", "RSTS=", "libynl.a"], tree)
    release = _run([*make, "kernelrelease"], tree).strip()
    shutil.copy2(f"{tree}/arch/x86/boot/bzImage", f"{partial}/boot/vmlinuz-{release}")
    shutil.copy2(f"{tree}/.config", f"{partial}/config")
    _run([*make, "run-command", f"KBUILD_RUN_COMMAND=$(srctree)/scripts/package/install-extmod-build {partial}/headers"], tree)
    for path in [*SELFTESTS, *WITH_SELFTESTS]:
        target = f"{partial}/tree/{path}"
        if os.path.isdir(f"{tree}/{path}"):
            shutil.copytree(f"{tree}/{path}", target, symlinks=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy2(f"{tree}/{path}", target)
    client(f"{partial}/tree", f"{partial}/tree/{HARDWARE}/ncdevmem.c", f"{partial}/tree/{HARDWARE}/ncdevmem")
    os.rename(partial, place)


def client(tree, source, program):
    """Compiles one program against a variant's headers and its netlink library."""
    include = [f"-I{tree}/{path}" for path in ("usr/include", "tools/testing/selftests", f"{YNL}/lib", f"{YNL}/generated")]
    line = ["gcc", "-O2", "-Wall", "-static", "-pthread", *include, source, f"{tree}/{YNL}/libynl.a", "-o", program]
    _run(line, os.path.dirname(source))


def _run(command, where):
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join((done.stderr.strip() or done.stdout.strip())[-1000:].split())
        raise Missing(f"a build in {where}: {' '.join(command[:8])} fails: {said}")
    return done.stdout
