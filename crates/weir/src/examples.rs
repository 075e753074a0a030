//! The examples of each man page: a command that the parser accepts, and a line about it.

/// The examples, by the name of the man page. The page `weir-on` is about the command `weir on`.
const EXAMPLES: &[(&str, &[(&str, &str)])] = &[
    (
        "weir",
        &[
            ("weir doctor", "What this machine offers, and the next step for what it lacks."),
            ("weir on", "Swap on GPU memory that lies idle; as root."),
            ("weir status", "Whether all is well."),
            ("weir off", "Bring every page back and undo all of it."),
        ],
    ),
    (
        "weir-try",
        &[
            ("weir try", "Ten seconds on the GPU's memory if there is any, else on host memory."),
            ("weir try --store file:/var/tmp/pages?size=1GiB --seconds 60", "A minute on an encrypted file."),
        ],
    ),
    (
        "weir-on",
        &[
            ("weir on", "Take what lies idle of the first GPU."),
            (
                "weir on --store host --size 2GiB --compress zstd --backing auto",
                "2 GiB of RAM, a disk below.",
            ),
            ("weir on --parts 4", "Four devices, given back one by one."),
        ],
    ),
    ("weir-off", &[("weir off", "Bring every page back; where they do not fit, nothing is changed.")]),
    ("weir-restart", &[("weir restart", "After an upgrade: the new program takes the pages over.")]),
    (
        "weir-serve",
        &[
            ("weir serve --store host:8GiB --nbd unix:/run/weir/nbd.sock", "8 GiB of RAM for NBD clients."),
            (
                "weir serve --store vram: --backing /var/lib/weir/pages?size=32GiB --ublk --keeper",
                "All GPUs, a disk below, and a process that survives the daemon.",
            ),
            ("weir serve --config /etc/weir.toml", "The same flags from a file."),
        ],
    ),
    ("weir-battery", &[("weir battery --below 20", "Turn off below 20 per cent, and on again with mains.")]),
    (
        "weir-top",
        &[("weir top", "Watch it; q ends."), ("weir top --once", "One picture, for a file or a pipe.")],
    ),
    (
        "weir-status",
        &[
            ("weir status", "For people."),
            ("weir status --json", "For programs; keys never change their meaning."),
        ],
    ),
    ("weir-volume", &[("weir volume list", "The volumes of the daemon that runs.")]),
    (
        "weir-volume-create",
        &[("weir volume create scratch 4GiB", "NBD clients ask for the export scratch from now on.")],
    ),
    ("weir-volume-list", &[("weir volume list", "Names and sizes, and the room for more.")]),
    ("weir-volume-resize", &[("weir volume resize scratch 8GiB", "Clients that connect anew see it.")]),
    ("weir-volume-remove", &[("weir volume remove scratch", "Refused while a client has it.")]),
    (
        "weir-give-back",
        &[
            ("weir give-back all", "Before a game: the card is free, the swap stays, on a disk."),
            ("weir give-back 4GiB", "Only as much."),
        ],
    ),
    ("weir-take", &[("weir take all", "After the game: use the memory again.")]),
    (
        "weir-cache",
        &[(
            "weir cache create --home /dev/sdb --store vram:0?size=8GiB --nbd unix:/run/weir/cache.nbd",
            "8 GiB of GPU memory in front of a disk.",
        )],
    ),
    (
        "weir-cache-create",
        &[
            (
                "weir cache create --home /dev/sdb --store vram:0?size=8GiB --nbd unix:/run/weir/cache.nbd",
                "8 GiB of GPU memory in front of a disk; weir attach makes a disk of it.",
            ),
            (
                "weir cache create --home log:/dev/sdb,/dev/sdc --store host:4GiB --fuse /run/weir/cached",
                "In front of a log over two disks; what they hold is lost.",
            ),
            (
                "weir cache create --durable --home 'log:/dev/sdb,/dev/sdc?encrypt=off' --store host:4GiB --fuse /run/weir/cached",
                "The same, and what was flushed outlives the cache.",
            ),
        ],
    ),
    (
        "weir-cache-open",
        &[(
            "weir cache open --home log:/dev/sdb,/dev/sdc --store host:4GiB --fuse /run/weir/cached",
            "Serve a durable log again, after a detach or a crash.",
        )],
    ),
    (
        "weir-cache-check",
        &[("weir cache check log:/dev/sdb,/dev/sdc", "Whether a durable log that nobody uses is whole.")],
    ),
    ("weir-cache-status", &[("weir cache status", "What is cached, dirty, and written to the disk.")]),
    ("weir-cache-flush", &[("weir cache flush", "Returns once every page is at the disk.")]),
    ("weir-cache-mode", &[("weir cache mode write-through", "From now on each write is at the disk too.")]),
    (
        "weir-cache-resize",
        &[
            ("weir cache resize 4GiB", "The cache uses 4 GiB of its store from now on."),
            ("weir cache resize --home", "The disk has grown: the device grows too."),
        ],
    ),
    (
        "weir-cache-trace",
        &[(
            "weir cache trace day --seconds 60",
            "Then weir bench policy --trace day: what a cache can gain.",
        )],
    ),
    ("weir-cache-detach", &[("weir cache detach", "Every page goes to the disk, then the cache ends.")]),
    ("weir-stack", &[("weir stack status", "The stack of this machine, if there is one.")]),
    (
        "weir-stack-create",
        &[
            (
                "weir stack create --cache /dev/nbd0 /dev/sdb /dev/sdc",
                "Two disks behind what weir attach has connected; a dead cache loses nothing.",
            ),
            (
                "weir stack create --mode write-back --cache /dev/ublkb0 /dev/sdb /dev/sdc",
                "For swap and scratch: writes go home in long rows.",
            ),
        ],
    ),
    ("weir-stack-status", &[("weir stack status", "Dirty bytes, hit rates, settings.")]),
    ("weir-stack-destroy", &[("weir stack destroy", "Every page goes to the disks, then the stack ends.")]),
    (
        "weir-run",
        &[(
            "weir run --resident 1GiB --store file:/var/tmp/pages?size=16GiB -- sort big.txt",
            "At most 1 GiB of its large memory in RAM, the rest in an encrypted file.",
        )],
    ),
    (
        "weir-vm",
        &[(
            "weir vm --resident 4GiB --store vram:0?size=12GiB -- qemu-system-x86_64 -enable-kvm -m 16G disk.qcow2",
            "A guest with 16 GiB, of which 12 GiB lie on a card.",
        )],
    ),
    ("weir-limit", &[("weir limit 4711 256MiB", "From now on at most so much of process 4711 is resident.")]),
    ("weir-evict", &[("weir evict 4711", "All of process 4711 goes to its stores once.")]),
    (
        "weir-attach",
        &[
            ("weir attach unix:/run/weir/nbd.sock", "A free device; its name is printed."),
            ("weir attach --device /dev/nbd3 --connections 4 unix:/run/weir/nbd.sock", "A device by name."),
        ],
    ),
    ("weir-detach", &[("weir detach /dev/nbd0", "Refused while something uses it.")]),
    (
        "weir-mount",
        &[
            ("weir mount /mnt/ram --store host --size 8GiB", "A RAM disk in host memory."),
            ("fusermount3 -u /mnt/ram", "Ends it, and everything on it."),
        ],
    ),
    ("weir-doctor", &[("weir doctor", "For people."), ("weir doctor --json", "For programs.")]),
    (
        "weir-bench",
        &[("weir bench block --json block.json", "NBD beside nbdkit, and the figures in a file.")],
    ),
    (
        "weir-completions",
        &[(
            "weir completions bash >/usr/share/bash-completion/completions/weir",
            "Also zsh and fish: fish reads ~/.config/fish/completions/weir.fish.",
        )],
    ),
    ("weir-man", &[("weir man /usr/local/share/man/man1", "A page for each command.")]),
];

/// The examples of a man page.
pub fn of(page: &str) -> Vec<(String, String)> {
    let found = EXAMPLES.iter().find(|(name, _)| *name == page).map_or(&[][..], |(_, examples)| examples);
    found.iter().map(|(command, about)| ((*command).to_owned(), (*about).to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::EXAMPLES;
    use crate::cli::Cli;
    use clap::Parser as _;

    #[test]
    fn every_example_of_a_man_page_is_a_command_that_the_parser_accepts() {
        for (command, _) in EXAMPLES.iter().flat_map(|(_, examples)| *examples) {
            let words = command.split(" >").next().unwrap_or_default().split(' ');
            if command.starts_with("weir ")
                && let Err(error) = Cli::try_parse_from(words)
            {
                panic!("{command}: {error}");
            }
        }
    }
}
