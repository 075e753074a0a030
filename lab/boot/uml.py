"""User-Mode Linux: a kernel as a process. Boots in about a second, the host's / read-only by hostfs."""

import os

# The disk of a root of the guest's own.
DISK = "/dev/ubda"


def has_smp(kernel):
    """Whether it can have more than one CPU."""
    return kernel.name.endswith("-smp")


def cpus(kernel, asked, _wanted):
    """How many CPUs it gets, whatever the scenario wants: one, unless the run asks for more. To take a page from a program that runs on
    another CPU, the kernel only makes a note (flush_tlb_page in arch/um), so until that program enters the kernel, milliseconds
    later, what it writes is lost.
    """
    return (asked or 1) if has_smp(kernel) else 1


def command(kernel, guest):
    """The command line that boots `guest` on `kernel`, its console on stdout, and the environment it needs."""
    line = [
        kernel.image,
        f"mem={guest.memory_mib}M",
        "rootfstype=hostfs",
        "root=/dev/root",
        "rootflags=/",
        "ro",
        # This init is not the one in the share. The share may lie below /dev, where the guest has
        # its own by then.
        f"init={os.path.join(os.path.dirname(os.path.abspath(__file__)), 'init')}",
        "con0=null,fd:1",
        "con=null",
        "quiet",
        "loglevel=3",
        "panic=-1",
        *guest.kernel_arguments(),
    ]
    if has_smp(kernel):
        # With more than one CPU, programs must run under seccomp instead of ptrace.
        line += ["seccomp=on", f"ncpus={guest.cpus}"]
    if guest.image:
        # The guest's writes go to a file of this run, and the image stays as it is.
        line.append(f"ubd0={guest.share}/disk,{guest.image}")
    # The guest's memory is a file in TMPDIR. On a disk the host would write it back.
    return line, {"TMPDIR": "/dev/shm"}


def prepare(_kernel, _guest):
    """Does nothing: hostfs is built into the kernel, and the guest mounts what it needs."""
    return []


def where(_guest):
    """Returns nothing: the guest's processors are the host's."""
    return []
