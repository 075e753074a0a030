"""QEMU without hardware virtualisation, for kernels that UML cannot be: Debian's own, with modules, several CPUs.

The host's / comes by virtiofs; its cache is the host's page cache, so programs start as fast as from a disk.
"""

import os
import re
import shutil
import socket
import subprocess
import time

from . import initramfs
from .outcome import Missing

# Modules that must be loaded before the root can be mounted. modprobe in the guest finds all
# others.
ROOT_MODULES = ["virtio_pci", "virtiofs"]
# The disk of a root of the guest's own, and the modules that it needs.
DISK, DISK_MODULES = "/dev/vda", ["virtio_blk", "crc32c_generic", "ext4"]
# Seconds that QEMU's monitor may take to answer.
MONITOR_S = 3
VIRTIOFSD = ["/usr/libexec/virtiofsd", "/usr/lib/qemu/virtiofsd"]


def cpus(_kernel, asked, wanted):
    """How many CPUs it gets: what the scenario wants, unless the run asks for others."""
    return asked or wanted


def command(kernel, guest):
    """The command line that boots `guest` on `kernel`, its console on stdout, and the environment it needs."""
    line = [
        "qemu-system-x86_64",
        # Without -cx16, QEMU 7.2 mis-executes cmpxchg16b under kernels >= 6.12: 13 boots of 20
        # without, all with.
        *("-accel", f"tcg,thread={'single' if guest.counts else 'multi'}"),
        *(("-icount", "shift=0,sleep=off") if guest.counts else ()),
        *("-cpu", "qemu64,-cx16", "-M", "q35", "-smp", str(guest.cpus)),
        *("-m", f"{guest.memory_mib}M", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        # virtiofsd reads and writes the guest's memory itself, so that memory must be a shared
        # file.
        *("-object", f"memory-backend-memfd,id=ram,size={guest.memory_mib}M,share=on", "-numa", "node,memdev=ram"),
        *("-chardev", f"socket,id=root,path={guest.share}/virtiofs.sock"),
        *("-device", "vhost-user-fs-pci,chardev=root,tag=host,queue-size=1024"),
        *("-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"),
        # On this line the guest shows signs of life when its virtiofs does not answer.
        *("-chardev", f"file,id=alive,path={guest.share}/alive", "-serial", "chardev:alive"),
        # The lab asks the monitor where the processors are, when the guest does not say.
        *("-chardev", f"socket,id=monitor,path={guest.share}/monitor,server=on,wait=off", "-mon", "chardev=monitor"),
        *("-kernel", kernel.image, "-initrd", f"{guest.share}/initramfs"),
        "-append",
        " ".join(
            [
                *("console=ttyS0", "panic=-1", "loglevel=3", "mitigations=off", "tsc=reliable"),
                # On a busy host the emulated timer may come too late for the kernel's check of it.
                *("no_timer_check", *guest.kernel_arguments()),
                # A kernel that the lab built may have unit tests. They run at boot if they are
                # asked to.
                *(("kunit.enable=1", "kunit.autorun=1") if kernel.tree else ()),
            ]
        ),
    ]
    if guest.image:
        line += ["-drive", f"file={guest.share}/disk,format=qcow2,if=virtio,cache=unsafe"]
    return line, {}


def where(guest):
    """One line for each of the guest's processors, from the emulator: its address, and HLT=1 if it waits for an interrupt."""
    said = b""
    try:
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.settimeout(MONITOR_S)
            monitor.connect(f"{guest.share}/monitor")
            monitor.sendall(b"info status\ninfo registers -a\n")
            while data := monitor.recv(1 << 16):
                said += data
    except OSError as error:
        if not said:
            return [f"lab: the emulator does not answer: {error}"]
    found = re.findall(r"VM status: \w+|CPU#\d+|RIP=\w+ RFL=\w+|HLT=\d", said.decode(errors="replace"))
    return ["lab: the emulator says: " + " ".join(found)]


def prepare(kernel, guest):
    """Writes the initramfs and starts the file server; returns the processes that must end with the guest."""
    if shutil.which("qemu-system-x86_64") is None:
        raise Missing("qemu-system-x86_64 (package qemu-system-x86)")
    server = next((path for path in VIRTIOFSD if os.access(path, os.X_OK)), None)
    if server is None:
        raise Missing("virtiofsd (package qemu-system-common or virtiofsd)")
    if os.geteuid() != 0:
        raise Missing("root (virtiofsd serves the host's / to the guest)")
    busybox = shutil.which("busybox")
    if busybox is None:
        raise Missing("busybox (package busybox-static)")
    initramfs.write(f"{guest.share}/initramfs", busybox, kernel, ROOT_MODULES + (DISK_MODULES if guest.image else []))
    if guest.image and not os.path.exists(f"{guest.share}/disk"):
        if shutil.which("qemu-img") is None:
            raise Missing("qemu-img (package qemu-utils)")
        # The guest's writes go to a file of this run, and the image stays as it is.
        over = ["-b", guest.image, "-F", "raw", f"{guest.share}/disk"]
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *over], check=True)
    path = f"{guest.share}/virtiofs.sock"
    log = open(f"{guest.share}/virtiofsd.log", "wb")  # noqa: SIM115 - the child's for as long as it lives
    # Only the guest changes the files that it sees. With cache=auto each open of a file drops the
    # cached pages of it. Each program that starts then takes libc's pages away from all others. On
    # a busy host the guests did little else (invalidate_inode_pages2 in fuse_open).
    if server == VIRTIOFSD[0]:
        shared = ["--shared-dir", "/", "--sandbox", "none", "--cache", "always"]
    else:
        shared = ["-o", "source=/", "-o", "sandbox=chroot", "-o", "cache=always"]
    process = subprocess.Popen([server, f"--socket-path={path}", *shared], stdout=log, stderr=log)
    log.close()
    for _ in range(200):
        if os.path.exists(path):
            return [process]
        if process.poll() is not None:
            break
        time.sleep(0.02)
    with open(f"{guest.share}/virtiofsd.log", encoding="utf-8", errors="replace") as said:
        raise Missing(f"a working virtiofsd ({server} said: {said.read().strip()[-200:]})")
