"""What has to be built for a guest: the workspace's programs and out-of-tree modules."""

import glob
import json
import os
import shutil
import subprocess

from . import source
from .outcome import Failed, Missing


def programs(tree, packages, into, profile):
    """Builds cargo packages and copies their programs."""
    if shutil.which("cargo") is None:
        raise Missing("cargo (the guest runs programs of this workspace)")
    os.makedirs(into, exist_ok=True)
    selected = [argument for package in packages for argument in ("-p", package)]
    command = ["cargo", "build", "--quiet", "--profile", profile, "--bins", "--examples", "--message-format=json-render-diagnostics"]
    done = subprocess.run([*command, *selected], cwd=tree, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"cargo build {' '.join(selected)}: exit {done.returncode}")
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and message.get("executable"):
            shutil.copy2(message["executable"], into)


def modules(tree, directories, headers, scratch, into):
    """Builds each directory's modules against `headers`, in a copy, and collects the .ko files."""
    if shutil.which("make") is None:
        raise Missing("make (package make)")
    os.makedirs(into, exist_ok=True)
    for directory in directories:
        copy = os.path.join(scratch, directory)
        shutil.copytree(os.path.join(tree, directory), copy)
        done = subprocess.run(
            # BTF serves only tracing, and would need the program pahole. A module loads without it.
            ["make", "-C", headers, f"M={copy}", f"-j{os.cpu_count()}", "CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise Failed(f"modules in {directory}: make says\n{done.stdout.strip()}")
        for module in glob.glob(os.path.join(copy, "**", "*.ko"), recursive=True):
            shutil.copy2(module, into)


def clients(tree, directories, kernel, into):
    """Builds each directory's C programs for a kernel of our own, which alone has the headers that they need."""
    if kernel.tree is None:
        raise Missing(f"a kernel built from source, instead of {kernel.name}")
    for directory in directories:
        for path in glob.glob(os.path.join(tree, directory, "*.c")):
            source.client(kernel.tree, path, os.path.join(into, os.path.basename(path).removesuffix(".c")))
