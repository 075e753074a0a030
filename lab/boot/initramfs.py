"""The first file system of a QEMU guest: busybox, the modules that its root needs, and one script.

Written as a `newc` cpio archive (Documentation/driver-api/early-userspace/buffer-format.rst of the kernel).
"""

import lzma
import os
import stat

INIT = """#!/bin/busybox sh
# Mounts the root read-only (the host's / or this guest's), with the run's own directories on top.
# Then runs the lab's init.
busybox mkdir -p /proc /host /root
busybox mount -t proc proc /proc
for module in $(busybox cat /modules/order); do busybox insmod /modules/$module || exit 1; done
busybox mount -t virtiofs host /host || exit 1
busybox mount --bind /host /root && busybox mount -o remount,bind,ro /root
busybox mount -t tmpfs run /root/run
for pair in $(busybox tr ' ' '\\n' </proc/cmdline | busybox grep '^lab_mount='); do
    pair=${pair#lab_mount=}; from=${pair%%:*}; rest=${pair#*:}; to=${rest%%:*}; mode=${rest#*:}
    busybox mkdir -p /root$to
    busybox mount --bind /host$from /root$to || exit 1
    [ $mode = rw ] || busybox mount -o remount,bind,ro /root$to
done
busybox umount -l /host
busybox umount /proc
exec busybox switch_root /root /run/lab/init
"""


def write(path, busybox, kernel, modules):
    """Writes the archive: `busybox` must be a static program, `modules` are names that modules.dep knows."""
    files = {"init": (INIT.encode(), 0o755), "bin/busybox": (_read(busybox), 0o755)}
    order = _with_dependencies(kernel.modules, modules)
    for name in order:
        plain = os.path.basename(name).removesuffix(".xz")
        files[f"modules/{plain}"] = (_read(os.path.join(kernel.modules, name)), 0o644)
    names = " ".join(os.path.basename(name).removesuffix(".xz") for name in order)
    files["modules/order"] = (names.encode(), 0o644)
    with open(path, "wb") as archive:
        for directory in ("bin", "modules", "dev"):
            archive.write(_entry(directory, b"", stat.S_IFDIR | 0o755))
        archive.write(_entry("dev/console", b"", stat.S_IFCHR | 0o600, device=(5, 1)))
        for name, (content, mode) in files.items():
            archive.write(_entry(name, content, stat.S_IFREG | mode))
        archive.write(_entry("TRAILER!!!", b"", 0))


def _with_dependencies(directory, modules):
    """File names in an order in which each can be inserted."""
    needs, by_name = {}, {}
    with open(os.path.join(directory, "modules.dep"), encoding="utf-8") as file:
        for line in file:
            name, _, dependencies = line.partition(":")
            needs[name] = dependencies.split()
            by_name[os.path.basename(name).split(".ko")[0].replace("-", "_")] = name
    order = []
    for module in modules:
        name = by_name.get(module)
        if name is None:
            continue  # built in
        # modules.dep lists the nearest dependency first.
        for file in [*reversed(needs[name]), name]:
            if file not in order:
                order.append(file)
    return order


def _read(path):
    if path.endswith(".xz"):
        with lzma.open(path) as file:
            return file.read()
    with open(path, "rb") as file:
        return file.read()


def _entry(name, content, mode, device=(0, 0)):
    fields = [_entry.inode, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(name) + 1, 0]
    _entry.inode += 1
    header = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    return _padded(header) + _padded(content)


_entry.inode = 1


def _padded(data):
    return data + bytes(-len(data) % 4)
