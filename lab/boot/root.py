"""A root of the guest's own: Debian with systemd, made once by debootstrap, and never written to."""

import os
import shutil
import subprocess

from . import kernels
from .debian import mirror
from .outcome import Missing

SUITE = "bookworm"
PACKAGES = ["systemd-sysv", "udev", "kmod", "dbus"]
# Room for the root, the packages under test and a few hundred MiB of their data. The file is
# sparse.
SIZE = "2G"
NEEDS = {"debootstrap": "debootstrap", "mkfs.ext4": "e2fsprogs"}


def image():
    """The file system that every run starts from: in the cache, whole or not there."""
    for program, package in NEEDS.items():
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            raise Missing(f"{program} (package {package})")
    if os.geteuid() != 0:
        raise Missing("root (debootstrap makes a Debian root)")
    place = os.path.join(kernels.cache_dir(), "roots", "-".join([SUITE, *PACKAGES]))
    image = os.path.join(place, "ext4")
    with kernels.one_at_a_time("root"):
        if not os.path.exists(image):
            with kernels.whole(place) as partial:
                tree = os.path.join(partial, "tree")
                _debootstrap(tree)
                subprocess.run(["mkfs.ext4", "-q", "-d", tree, os.path.join(partial, "ext4"), SIZE], check=True)
                shutil.rmtree(tree)
    return image


def _debootstrap(tree):
    base, _, keyring = mirror()
    command = ["debootstrap", f"--keyring={keyring}", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, tree, base]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        said = [line for line in done.stdout.splitlines() if line.startswith("E:")] or done.stdout.splitlines()[-1:]
        raise Missing(f"a Debian root: debootstrap: {' '.join(said)}")
    for path, text in {"etc/fstab": "", "etc/hostname": "lab\n", "etc/hosts": "127.0.0.1 localhost lab\n"}.items():
        with open(os.path.join(tree, path), "w", encoding="utf-8") as file:
            file.write(text)
    shutil.rmtree(os.path.join(tree, "var/cache/apt"), ignore_errors=True)
    shutil.rmtree(os.path.join(tree, "var/lib/apt/lists"), ignore_errors=True)
