"""Kernel packages by name from the Debian mirror that this host already uses.

Everything happens in private apt directories under the cache: the host's package lists, its installed packages and
its sources are read, never changed. Superseded versions leave a mirror, so a kernel is found through its
meta-package and kept once fetched.
"""

import glob
import os
import re
import shutil
import subprocess

from .outcome import Missing


def mirror():
    """(base URI, security URI or None, keyring) of the host's Debian sources."""
    entries = []
    for path in sorted(glob.glob("/etc/apt/sources.list.d/*.sources")):
        for stanza in re.split(r"\n\s*\n", _without_comments(path)):
            fields = dict(re.findall(r"^([A-Za-z-]+):\s*(.+)$", stanza, re.M))
            if "deb" in fields.get("Types", "").split() and "main" in fields.get("Components", "").split():
                for uri in fields.get("URIs", "").split():
                    entries.append((uri.rstrip("/"), fields.get("Suites", ""), fields.get("Signed-By")))
    for path in ["/etc/apt/sources.list", *sorted(glob.glob("/etc/apt/sources.list.d/*.list"))]:
        pattern = r"^deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s+.*\bmain\b"
        for options, uri, suite in re.findall(pattern, _without_comments(path), re.M):
            key = re.search(r"signed-by=(\S+)", options)
            entries.append((uri.rstrip("/"), suite, key.group(1) if key else None))
    base = security = keyring = None
    for uri, suites, key in entries:
        if uri.endswith("-security") or "-security" in suites:
            security = security or uri
        elif uri.endswith("/debian"):
            base, keyring = base or uri, keyring or key
    if base is None:
        raise Missing("a Debian mirror in this host's apt sources (kernels come from there by package name)")
    keyring = keyring or "/usr/share/keyrings/debian-archive-keyring.gpg"
    if not os.path.exists(keyring):
        raise Missing(f"the archive's keyring {keyring} (package debian-archive-keyring)")
    return base, security, keyring


def _without_comments(path):
    try:
        with open(path, encoding="utf-8") as file:
            return "".join(line for line in file if not line.lstrip().startswith("#"))
    except FileNotFoundError:
        return ""


class Archive:
    """One suite of the mirror, seen through apt directories of its own."""

    def __init__(self, cache, suite):
        if shutil.which("apt-get") is None:
            raise Missing("apt-get (kernels come as Debian packages)")
        self.suite = suite
        self.dir = os.path.join(cache, "apt", suite)
        for sub in ("lists/partial", "archives/partial"):
            os.makedirs(os.path.join(self.dir, sub), exist_ok=True)
        base, security, keyring = mirror()
        uris = [(base, suite)]
        if "backports" in suite:
            uris.append((base, suite.removesuffix("-backports")))
        elif security and suite != "sid":
            uris.append((security, f"{suite}-security"))
        sources = os.path.join(self.dir, "lab.sources")
        with open(sources, "w", encoding="utf-8") as file:
            for uri, name in uris:
                file.write(f"Types: deb\nURIs: {uri}\nSuites: {name}\nComponents: main\nSigned-By: {keyring}\n\n")
        # The configuration of apt is empty. The host's own has hooks, and proxies for other suites.
        self.environment = dict(os.environ, LC_ALL="C")
        self.options = []
        for key, value in {
            "Dir::Etc::sourcelist": sources,
            "Dir::Etc::sourceparts": "-",
            "Dir::State": self.dir,
            "Dir::State::lists": os.path.join(self.dir, "lists"),
            "Dir::State::status": "/dev/null",
            "Dir::Cache": self.dir,
            "APT::Default-Release": suite,
            "APT::Sandbox::User": "root" if os.geteuid() == 0 else "",
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
            "Acquire::Retries": "2",
            "Acquire::http::Timeout": "20",
        }.items():
            self.options += ["-o", f"{key}={value}"]
        self.options += ["-o", "#clear=APT::Update::Post-Invoke-Success", "-o", "#clear=APT::Update::Post-Invoke"]

    def refresh(self):
        """Fetches the suite's index. Needed before names are resolved, not for what the cache already has."""
        self._apt("apt-get", "-q", "update")

    def closure(self, package, keep):
        """The package and what it depends on, as far as `keep` (a regular expression) matches the names."""
        found, open_names = [], [package]
        while open_names:
            name = open_names.pop()
            if name in found:
                continue
            found.append(name)
            for line in self._apt("apt-cache", "depends", "--important", name).splitlines():
                dependency = re.match(r"\s*\|?Depends: ([^<\s]\S*)$", line)
                if dependency and re.match(keep, dependency.group(1)):
                    open_names.append(dependency.group(1))
        return found

    def unpack(self, packages, into):
        """Downloads packages and unpacks their files below `into`, installing nothing."""
        downloads = os.path.join(self.dir, "archives")
        self._apt("apt-get", "-q", "download", *packages, cwd=downloads)
        for name in packages:
            for deb in glob.glob(os.path.join(downloads, f"{name}_*.deb")):
                subprocess.run(["dpkg", "-x", deb, into], check=True)
                os.unlink(deb)

    def _apt(self, program, *arguments, cwd=None):
        command = [program, *self.options, *arguments]
        done = subprocess.run(command, cwd=cwd, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = [line for line in done.stderr.splitlines() if line.startswith("E:")] or [done.stderr.strip()]
            raise Missing(f"packages of {self.suite}: {program} {arguments[-1]}: {said[0]}")
        return done.stdout
