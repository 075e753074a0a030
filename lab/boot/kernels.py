"""The kernels that scenarios may name, and where each lies once it is unpacked."""

import contextlib
import dataclasses
import fcntl
import glob
import gzip
import os
import re
import shutil
import subprocess

from . import source
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
    # Debian's source and configuration, with what Debian's own User-Mode Linux lacks. The lab
    # builds this kernel once.
    "uml-7.2-smp": ("uml", "sid", "linux-source-7.2", None),
    # A small kernel with device memory TCP: as it is, with the first patch of kernel/devmem, and
    # with all patches.
    "devmem": ("qemu", "trixie-backports", "linux-source-7.3", None),
    "devmem-fix": ("qemu", "trixie-backports", "linux-source-7.3", None),
    "devmem-table": ("qemu", "trixie-backports", "linux-source-7.3", None),
    # The last two kernels with KASAN, lockdep and kmemleak. Then again with bugs that these tools
    # must report.
    "devmem-fix-sanitize": ("qemu", "trixie-backports", "linux-source-7.3", None),
    "devmem-table-sanitize": ("qemu", "trixie-backports", "linux-source-7.3", None),
    "devmem-planted": ("qemu", "trixie-backports", "linux-source-7.3", None),
}

VARIANTS = {
    "devmem": source.Variant(0),
    "devmem-fix": source.Variant(1),
    "devmem-table": source.Variant(None),
    "devmem-fix-sanitize": source.Variant(1, sanitized=True),
    "devmem-table-sanitize": source.Variant(None, sanitized=True),
    "devmem-planted": source.Variant(None, sanitized=True, planted=True),
}

# Options that the built kernel has besides Debian's configuration, and options that it does
# without.
SWITCHED_ON = ["SMP", "PSI", "POWER_SUPPLY", "DEBUG_INFO_NONE"]
MODULES = ["BLK_DEV_UBLK", "TEST_POWER"]
SWITCHED_OFF = ["DEBUG_KERNEL", "DEBUG_INFO", "DEBUG_INFO_DWARF_TOOLCHAIN_DEFAULT", "MODULE_SIG"]
# The only modules that are built: those that scenarios load. Leaving the others out spares most of
# the time.
WANTED = r"BLK_DEV_(UBLK|NBD|LOOP)|ZRAM|FUSE_FS|AUTOFS_FS|CRYPTO_.*|LZO.*|LZ4.*|ZSTD.*|XXHASH.*"
# Programs that the build runs, and the Debian package of each.
BUILD_TOOLS = {"gcc": "gcc", "make": "make", "flex": "flex", "bison": "bison", "bc": "bc", "xz": "xz-utils"}


# The kernel that runs on hosts where User-Mode Linux 6.1 cannot.
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
    tree: str | None = None  # its source's selftests, and what programs for it are built with


def find(name, with_headers=False):
    """The kernel called `name`. It is fetched if this machine does not have it yet."""
    boot, suite, image_package, headers_package = KNOWN[name]
    if name in VARIANTS:
        return _own(name, suite, image_package)
    installed = _installed_uml() if name == "uml-6.1" else None
    provide = _built if image_package.startswith("linux-source-") else _fetched
    root = installed or provide(name, boot, suite, image_package)
    if boot == "uml":
        image = os.path.join(root, "usr/bin/linux.uml")
        modules = _only(os.path.join(root, "usr/lib/uml/modules/*"))
    else:
        # Since 7.x the kernel's image lies with its modules.
        image = _only(os.path.join(root, "boot/vmlinuz-*"), os.path.join(root, "lib/modules/*/vmlinuz"))
        modules = _only(os.path.join(root, "lib/modules/*"))
    kernel = Kernel(name, boot, image, os.path.basename(modules), modules)
    if with_headers:
        if headers_package is None:
            raise Missing(f"headers of {name}: Debian has none; name a QEMU kernel for out-of-tree modules")
        kernel.headers = _headers(name, suite, headers_package, kernel.release)
    return kernel


def _own(name, suite, package):
    """A variant of the kernel that is built for QEMU."""
    root = source.built(cache_dir(), suite, package, name, VARIANTS[name], one_at_a_time)
    modules = _only(os.path.join(root, "lib/modules/*"))
    image = _only(os.path.join(root, "boot/vmlinuz-*"))
    return Kernel(name, "qemu", image, os.path.basename(modules), modules, f"{root}/headers", f"{root}/tree")


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
            # linux-image-cloud-amd64 -> linux-image-VERSION-cloud-amd64 -> (7.x only) binary,
            # modules, base.
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


def _built(name, _boot, suite, package):
    """A User-Mode Linux of our own from Debian's source package, complete or not there at all."""
    place = os.path.join(cache_dir(), "kernels", name)
    with one_at_a_time(name):
        if not os.path.isdir(place):
            for tool, of in BUILD_TOOLS.items():
                if shutil.which(tool) is None:
                    raise Missing(f"{tool} (package {of}: {name} is built from Debian's source)")
            archive = Archive(cache_dir(), suite)
            archive.refresh()
            with whole(place) as partial:
                scratch = os.path.join(partial, "build")
                archive.unpack([package, "user-mode-linux"], scratch)
                _build(name, scratch, package, partial)
                shutil.rmtree(scratch)
    return place


def _build(name, scratch, package, into):
    print(f"lab: building {name}, once, which takes some minutes", flush=True)
    subprocess.run(["tar", "-xf", f"{scratch}/usr/src/{package}.tar.xz", "-C", scratch], check=True)
    source = os.path.join(scratch, package)
    with gzip.open(f"{scratch}/usr/share/doc/user-mode-linux/config.gz", "rt", encoding="utf-8") as file:
        config = file.read()
    config = re.sub(rf"^(CONFIG_(?!({WANTED})=)\w+)=m$", r"# \1 is not set", config, flags=re.M)
    with open(f"{source}/.config", "w", encoding="utf-8") as file:
        file.write(config)
    switches = [argument for flag, names in (("-e", SWITCHED_ON), ("-m", MODULES), ("-d", SWITCHED_OFF))
                for each in names for argument in (flag, each)]
    make = ["make", "-s", "ARCH=um"]
    steps = [
        ["scripts/config", *switches, "--set-val", "NR_CPUS", "4", "--set-str", "SYSTEM_TRUSTED_KEYS", ""],
        [*make, "olddefconfig"],
        [*make, f"-j{os.cpu_count()}", "linux", "modules"],
        [*make, f"INSTALL_MOD_PATH={into}/usr", "modules_install"],
    ]
    for step in steps:
        done = subprocess.run(step, cwd=source, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Missing(f"{name}: {' '.join(step[:3])} fails: {done.stderr.strip()[-400:]}")
    os.makedirs(f"{into}/usr/bin")
    shutil.copy2(f"{source}/linux", f"{into}/usr/bin/linux.uml")
    os.makedirs(f"{into}/usr/lib/uml")
    os.rename(f"{into}/usr/lib/modules", f"{into}/usr/lib/uml/modules")


def _headers(name, suite, package, release):
    """The headers to build modules for `release` with. Their absolute paths are changed to where they lie now."""
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
    """Holds a lock, so that two runs that need the same kernel fetch it once."""
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
