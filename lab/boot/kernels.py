"""The kernels that scenarios may name, and where each lies once it is unpacked."""

import contextlib
import dataclasses
import fcntl
import glob
import os
import shutil
import subprocess

from .debian import Archive
from .outcome import Missing

# name -> (how it boots, suite, package of the kernel, package of its headers)
KNOWN = {
    "uml-6.1": ("uml", "bookworm", "user-mode-linux", None),
    "uml-7.2": ("uml", "sid", "user-mode-linux", None),
    "debian-6.1-cloud": ("qemu", "bookworm", "linux-image-cloud-amd64", "linux-headers-cloud-amd64"),
    "debian-6.1": ("qemu", "bookworm", "linux-image-amd64", "linux-headers-amd64"),
    "debian-6.12-cloud": ("qemu", "bookworm-backports", "linux-image-cloud-amd64", "linux-headers-cloud-amd64"),
    "debian-7-cloud": ("qemu", "trixie-backports", "linux-image-cloud-amd64", "linux-headers-cloud-amd64"),
    "debian-6.12": ("qemu", "bookworm-backports", "linux-image-amd64", "linux-headers-amd64"),
}


# What runs where User-Mode Linux 6.1 cannot.
INSTEAD = "uml-7.2"


def bootable(name):
    """`name`, or the kernel that stands in for it on this machine, and then why.

    User-Mode Linux 6.1 restores a process's floating point state from 2696 bytes (arch/x86/um/user-offsets.c); with
    AMX the state is 11 KB, the host's kernel takes no less, and the guest's first process dies of it.
    """
    if name != "uml-6.1":
        return name, None
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        amx = any(line.startswith("flags") and " amx_tile" in line for line in file)
    return (INSTEAD, f"{name} cannot run on a CPU with AMX") if amx else (name, None)


def cache_dir():
    """Where fetched kernels stay between runs."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "weir-lab")
    return os.environ.get("WEIR_LAB_CACHE") or default


@dataclasses.dataclass
class Kernel:
    """A kernel ready to boot."""

    name: str
    boot: str  # "uml" or "qemu"
    image: str  # the file that is run (UML) or loaded (QEMU)
    release: str  # what uname -r will say
    modules: str  # the directory that holds modules.dep
    headers: str | None = None  # for out-of-tree modules


def find(name, with_headers=False):
    """The kernel called `name`, fetched if this machine does not have it yet."""
    boot, suite, image_package, headers_package = KNOWN[name]
    installed = _installed_uml() if name == "uml-6.1" else None
    root = installed or _fetched(name, boot, suite, image_package)
    if boot == "uml":
        image = os.path.join(root, "usr/bin/linux.uml")
        modules = _only(os.path.join(root, "usr/lib/uml/modules/*"))
    else:
        # Since 7.x the kernel lies with its modules.
        image = _only(os.path.join(root, "boot/vmlinuz-*"), os.path.join(root, "lib/modules/*/vmlinuz"))
        modules = _only(os.path.join(root, "lib/modules/*"))
    kernel = Kernel(name, boot, image, os.path.basename(modules), modules)
    if with_headers:
        if headers_package is None:
            raise Missing(f"headers of {name}: Debian has none; name a QEMU kernel for out-of-tree modules")
        kernel.headers = _headers(name, suite, headers_package, kernel.release)
    return kernel


def _installed_uml():
    return "/" if glob.glob("/usr/lib/uml/modules/*/modules.dep") and os.path.exists("/usr/bin/linux.uml") else None


def _only(*patterns):
    found = sorted(path for pattern in patterns for path in glob.glob(pattern))
    if not found:
        raise Missing(f"{patterns[0]} (the cached kernel is incomplete: remove {cache_dir()} and run again)")
    return found[-1]


def _with_its_own_libc(program, libraries):
    loader = f"{libraries}/ld-linux-x86-64.so.2"
    subprocess.run(["patchelf", "--set-interpreter", loader, "--set-rpath", libraries, program], check=True)


def _fetched(name, boot, suite, package):
    """The kernel's files below the cache, complete or not there at all."""
    place = os.path.join(cache_dir(), "kernels", name)
    with one_at_a_time(name):
        if not os.path.isdir(place):
            archive = Archive(cache_dir(), suite)
            archive.refresh()
            # linux-image-cloud-amd64 -> linux-image-VERSION-cloud-amd64 -> (7.x only) binary, modules, base.
            names = archive.closure(package, r"linux-(image|binary|modules|base)-.*\d")
            foreign = boot == "uml" and suite != "bookworm"
            if foreign and shutil.which("patchelf") is None:
                raise Missing(f"patchelf (package patchelf: {name} comes with a newer C library than the host's)")
            with whole(place) as partial:
                archive.unpack([*names, "libc6"] if foreign else names, partial)
                if foreign:
                    _with_its_own_libc(f"{partial}/usr/bin/linux.uml", f"{place}/usr/lib/x86_64-linux-gnu")
                if not os.path.exists(os.path.join(partial, "lib")):
                    os.symlink("usr/lib", os.path.join(partial, "lib"))
                for modules in glob.glob(os.path.join(partial, "lib/modules/*")):
                    subprocess.run(["depmod", "-b", partial, os.path.basename(modules)], check=True)
    return place


def _headers(name, suite, package, release):
    """The header tree to build modules for `release` against, its absolute paths turned to where it lies now."""
    place = os.path.join(cache_dir(), "headers", release)
    with one_at_a_time(f"headers-{name}"):
        if not os.path.isdir(place):
            archive = Archive(cache_dir(), suite)
            archive.refresh()
            flavour = f"linux-headers-{release}"
            names = archive.closure(flavour, r"linux-(headers|kbuild)-")
            with whole(place) as partial:
                archive.unpack(names, partial)
                for makefile in glob.glob(os.path.join(partial, "usr/src/*/Makefile")):
                    with open(makefile, encoding="utf-8") as file:
                        text = file.read()
                    with open(makefile, "w", encoding="utf-8") as file:
                        file.write(text.replace("/usr/src/", f"{place}/usr/src/"))
    return os.path.join(place, "usr/src", f"linux-headers-{release}")


@contextlib.contextmanager
def one_at_a_time(name):
    """Two runs that need the same kernel fetch it once."""
    locks = os.path.join(cache_dir(), "locks")
    os.makedirs(locks, exist_ok=True)
    with open(os.path.join(locks, name), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def whole(place):
    """A directory that appears under its name only when everything in it is there."""
    partial = f"{place}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    os.makedirs(partial)
    try:
        yield partial
        os.rename(partial, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
