use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

const NOW: Time = Duration::from_secs(1);

fn new(mode: u32) -> New {
    New { mode, uid: 1, gid: 1, rdev: 0, target: Vec::new() }
}

/// A model to compare the tree with: every name by its path, with its node's number.
#[derive(Clone, Debug, Default)]
struct Model {
    names: BTreeMap<Vec<u8>, usize>,
    nodes: Vec<Thing>,
}

#[derive(Clone, Debug)]
struct Thing {
    is_directory: bool,
    size: u64,
    pages: BTreeSet<u64>,
}

#[derive(Clone, Debug)]
enum Operation {
    Make { path: Vec<u8>, directory: bool },
    Link { from: Vec<u8>, to: Vec<u8> },
    Unlink(Vec<u8>),
    Rmdir(Vec<u8>),
    Rename { from: Vec<u8>, to: Vec<u8>, flags: u32 },
    Write { path: Vec<u8>, page: u64, pages: u64 },
    Resize { path: Vec<u8>, size: u64 },
    Punch { path: Vec<u8>, page: u64, pages: u64 },
}

impl Model {
    fn get(&self, path: &[u8]) -> Result<usize> {
        // In the model the root is directory usize::MAX.
        for end in 1..path.len() {
            match self.names.get(&path[..end]) {
                None => return Err(Errno::NOENT),
                Some(node) if !self.nodes[*node].is_directory => return Err(Errno::NOTDIR),
                Some(_) => {}
            }
        }
        self.names.get(path).copied().ok_or(Errno::NOENT)
    }

    fn parent_exists(&self, path: &[u8]) -> Result<()> {
        if path.len() < 2 {
            return Ok(());
        }
        match self.get(&path[..path.len() - 1]) {
            Ok(node) if self.nodes[node].is_directory => Ok(()),
            Ok(_) => Err(Errno::NOTDIR),
            Err(errno) => Err(errno),
        }
    }

    fn has_children(&self, path: &[u8]) -> bool {
        self.names.keys().any(|name| name.len() > path.len() && name.starts_with(path))
    }

    fn file(&mut self, path: &[u8]) -> Result<&mut Thing> {
        let node = self.get(path)?;
        let thing = &mut self.nodes[node];
        if thing.is_directory { Err(Errno::ISDIR) } else { Ok(thing) }
    }

    fn shift(&mut self, from: &[u8], to: &[u8]) {
        let moved: Vec<_> = self.names.keys().filter(|name| name.starts_with(from)).cloned().collect();
        let moved: Vec<_> =
            moved.into_iter().map(|name| (name.clone(), self.names.remove(&name).unwrap())).collect();
        for (name, node) in moved {
            self.names.insert([to, &name[from.len()..]].concat(), node);
        }
    }

    fn apply(&mut self, operation: &Operation) -> Result<()> {
        match operation {
            Operation::Make { path, directory } => {
                self.parent_exists(path)?;
                if self.names.contains_key(path) {
                    return Err(Errno::EXIST);
                }
                self.names.insert(path.clone(), self.nodes.len());
                self.nodes.push(Thing { is_directory: *directory, size: 0, pages: BTreeSet::new() });
            }
            Operation::Link { from, to } => {
                let node = self.get(from)?;
                self.parent_exists(to)?;
                if self.names.contains_key(to) {
                    return Err(Errno::EXIST);
                }
                if self.nodes[node].is_directory {
                    return Err(Errno::PERM);
                }
                self.names.insert(to.clone(), node);
            }
            Operation::Unlink(path) => {
                let node = self.get(path)?;
                if self.nodes[node].is_directory {
                    return Err(Errno::ISDIR);
                }
                self.names.remove(path);
            }
            Operation::Rmdir(path) => {
                let node = self.get(path)?;
                if !self.nodes[node].is_directory {
                    return Err(Errno::NOTDIR);
                }
                if self.has_children(path) {
                    return Err(Errno::NOTEMPTY);
                }
                self.names.remove(path);
            }
            Operation::Rename { from, to, flags } => self.rename(from, to, *flags)?,
            Operation::Write { path, page, pages } => {
                let thing = self.file(path)?;
                thing.pages.extend(*page..page + pages);
                thing.size = thing.size.max((page + pages) * PAGE_SIZE as u64);
            }
            Operation::Resize { path, size } => {
                let thing = self.file(path)?;
                thing.size = *size;
                thing.pages.retain(|page| page * (PAGE_SIZE as u64) < *size);
            }
            Operation::Punch { path, page, pages } => {
                self.file(path)?.pages.retain(|held| !(*page..page + pages).contains(held));
            }
        }
        Ok(())
    }

    fn rename(&mut self, from: &[u8], to: &[u8], flags: u32) -> Result<()> {
        let moved = self.get(from)?;
        self.parent_exists(to)?;
        let replaced = self.names.get(to).copied();
        let exchange = flags == EXCHANGE;
        if to.len() > from.len() && to.starts_with(from) {
            return Err(Errno::INVAL);
        }
        if exchange && replaced.is_some() && from.len() > to.len() && from.starts_with(to) {
            return Err(Errno::INVAL);
        }
        let Some(other) = replaced else {
            if exchange {
                return Err(Errno::NOENT);
            }
            self.shift(from, to);
            return Ok(());
        };
        if flags == NO_REPLACE {
            return Err(Errno::EXIST);
        }
        if other == moved {
            return Ok(());
        }
        if exchange {
            self.shift(from, b"\0");
            self.shift(to, from);
            self.shift(b"\0", to);
            return Ok(());
        }
        match (self.nodes[moved].is_directory, self.nodes[other].is_directory) {
            (true, false) => return Err(Errno::NOTDIR),
            (false, true) => return Err(Errno::ISDIR),
            (true, true) if self.has_children(to) => return Err(Errno::NOTEMPTY),
            _ => {}
        }
        self.names.remove(to);
        self.shift(from, to);
        Ok(())
    }
}

fn walk(tree: &Tree, path: &[u8]) -> Result<u64> {
    path.iter().try_fold(ROOT, |node, name| tree.lookup(node, &[*name]))
}

fn parent<'a>(tree: &Tree, path: &'a [u8]) -> Result<(u64, &'a [u8])> {
    let (name, above) = path.split_last().expect("no operation is on the root");
    Ok((walk(tree, above)?, std::slice::from_ref(name)))
}

fn apply(tree: &mut Tree, operation: &Operation) -> Result<()> {
    match operation {
        Operation::Make { path, directory } => {
            let (above, name) = parent(tree, path)?;
            tree.make(above, name, new(if *directory { DIRECTORY } else { FILE } | 0o755), NOW).map(drop)
        }
        Operation::Link { from, to } => {
            let node = walk(tree, from)?;
            let (above, name) = parent(tree, to)?;
            tree.link(node, above, name, NOW)
        }
        Operation::Unlink(path) => {
            let (above, name) = parent(tree, path)?;
            tree.unlink(above, name, NOW).map(drop)
        }
        Operation::Rmdir(path) => {
            let (above, name) = parent(tree, path)?;
            tree.rmdir(above, name, NOW).map(drop)
        }
        Operation::Rename { from, to, flags } => {
            let (above, name) = parent(tree, from)?;
            walk(tree, from)?;
            let (to_above, to_name) = parent(tree, to)?;
            tree.rename((above, name), (to_above, to_name), *flags, NOW).map(drop)
        }
        Operation::Write { path, page, pages } => {
            let node = walk(tree, path)?;
            tree.reserve(node, *page..page + pages)?;
            tree.written(node, (page + pages) * PAGE_SIZE as u64, NOW)
        }
        Operation::Resize { path, size } => {
            let node = walk(tree, path)?;
            tree.resize(node, *size, NOW).map(drop)
        }
        Operation::Punch { path, page, pages } => {
            let node = walk(tree, path)?;
            tree.punch(node, *page..page + pages).map(drop)
        }
    }
}

/// Compares everything visible below a directory; returns the number of pages held.
fn compare(tree: &Tree, model: &Model, node: u64, path: &[u8], seen: &mut BTreeMap<u64, usize>) {
    let attr = tree.attr(node).unwrap();
    let listed: Vec<Vec<u8>> = tree.list(node, 2).unwrap().map(|entry| entry.name.to_vec()).collect();
    let mut names: Vec<Vec<u8>> = model
        .names
        .keys()
        .filter(|name| name.len() == path.len() + 1 && name.starts_with(path))
        .map(|name| name[path.len()..].to_vec())
        .collect();
    let mut sorted = listed.clone();
    sorted.sort();
    names.sort();
    assert_eq!(sorted, names, "{path:?}");
    let mut directories = 0;
    for name in listed {
        let below = [path, &name].concat();
        let child = tree.lookup(node, &name).unwrap();
        let number = model.names[&below];
        let thing = &model.nodes[number];
        assert_eq!(*seen.entry(child).or_insert(number), number, "{below:?} is another node");
        let attr = tree.attr(child).unwrap();
        assert_eq!(attr.mode & KIND == DIRECTORY, thing.is_directory);
        if thing.is_directory {
            directories += 1;
            assert_eq!(tree.lookup(child, b".."), Ok(node));
            compare(tree, model, child, &below, seen);
        } else {
            let names = model.names.values().filter(|other| **other == number).count();
            assert_eq!((attr.size, attr.nlink), (thing.size, names as u32), "{below:?}");
            assert_eq!(attr.blocks, thing.pages.len() as u64 * 8);
            let holds = (0..40).filter(|page| tree.place(child, *page).is_some()).collect::<BTreeSet<_>>();
            assert_eq!(holds, thing.pages);
        }
    }
    assert_eq!(attr.nlink, 2 + directories);
}

fn path() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(b'a'..b'd', 1..4)
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        4 => (path(), any::<bool>()).prop_map(|(path, directory)| Operation::Make { path, directory }),
        1 => (path(), path()).prop_map(|(from, to)| Operation::Link { from, to }),
        1 => path().prop_map(Operation::Unlink),
        1 => path().prop_map(Operation::Rmdir),
        3 => (path(), path(), 0u32..3).prop_map(|(from, to, flags)| Operation::Rename { from, to, flags }),
        2 => (path(), 0u64..30, 1u64..8).prop_map(|(path, page, pages)| Operation::Write { path, page, pages }),
        1 => (path(), 0u64..160_000).prop_map(|(path, size)| Operation::Resize { path, size }),
        1 => (path(), 0u64..30, 1u64..8).prop_map(|(path, page, pages)| Operation::Punch { path, page, pages }),
    ]
}

proptest! {
    #[test]
    fn a_tree_is_what_was_made_of_it(operations in proptest::collection::vec(operation(), 1..60)) {
        let mut tree = Tree::new(10_000, (0, 0), 0o755, NOW);
        let mut model = Model::default();
        for operation in &operations {
            let (ours, theirs) = (apply(&mut tree, operation), model.clone().apply(operation));
            prop_assert_eq!(ours, theirs, "{:?}", operation);
            // An operation that fails must change nothing.
            if theirs.is_ok() {
                model.apply(operation).unwrap();
            }
            let mut seen = BTreeMap::new();
            compare(&tree, &model, ROOT, b"", &mut seen);
            let named: BTreeSet<usize> = model.names.values().copied().collect();
            let held: usize = named.iter().map(|node| model.nodes[*node].pages.len()).sum();
            prop_assert_eq!(tree.room().free() as usize, 10_000 - held, "pages are neither lost nor shared");
            prop_assert_eq!(tree.nodes(), 1 + named.len());
        }
    }
}

#[test]
fn a_file_without_a_name_keeps_its_pages_until_the_kernel_forgets_it() {
    let mut tree = Tree::new(100, (0, 0), 0o755, NOW);
    let node = tree.make(ROOT, b"file", new(FILE | 0o644), NOW).unwrap();
    tree.remember(node);
    tree.remember(node);
    tree.reserve(node, 0..10).unwrap();
    assert_eq!(tree.unlink(ROOT, b"file", NOW), Ok(Vec::new()));
    assert_eq!((tree.attr(node).unwrap().nlink, tree.room().free()), (0, 90));
    assert_eq!(tree.forget(node, 1), Vec::new());
    assert_eq!(tree.forget(node, 1).len(), 10);
    assert_eq!((tree.attr(node), tree.room().free()), (Err(Errno::STALE), 100));
}

#[test]
fn a_file_that_does_not_fit_takes_nothing() {
    let mut tree = Tree::new(10, (0, 0), 0o755, NOW);
    let node = tree.make(ROOT, b"file", new(FILE), NOW).unwrap();
    tree.reserve(node, 0..6).unwrap();
    assert_eq!(tree.reserve(node, 4..11), Err(Errno::NOSPC));
    assert_eq!(tree.room().free(), 4);
    tree.reserve(node, 2..10).unwrap();
    assert_eq!(tree.room().free(), 0);
}

#[test]
fn a_range_that_cannot_fit_is_refused_without_a_look_at_each_of_its_pages() {
    let mut tree = Tree::new(4, (0, 0), 0o755, NOW);
    let node = tree.make(ROOT, b"file", new(FILE), NOW).expect("made");
    let most = SIZE_MAX / PAGE_SIZE as u64;
    let begun = std::time::Instant::now();
    for _ in 0..100 {
        assert_eq!(tree.reserve(node, 0..most), Err(Errno::NOSPC));
    }
    let at_once = begun.elapsed();
    // For comparison, look at each page in the first thousandth of the file. The 100 refusals above
    // must together take less time than these looks.
    let begun = std::time::Instant::now();
    let looked = (0..most / 1000).filter(|page| tree.place(node, *page).is_some()).count();
    assert!(
        looked == 0 && at_once < begun.elapsed(),
        "{at_once:?}, a part of the looks {:?}",
        begun.elapsed()
    );
    tree.reserve(node, 1..4).expect("these fit");
    tree.reserve(node, 0..4).expect("and so does the rest");
    assert_eq!(tree.reserve(node, 0..5), Err(Errno::NOSPC));
}

#[test]
fn names_are_bounded_too() {
    let mut tree = Tree::new(4, (0, 0), 0o755, NOW);
    let node = tree.make(ROOT, b"file", new(FILE), NOW).expect("made");
    let most = tree.nodes_max();
    let name = |at: usize| format!("link{at}").into_bytes();
    for at in 0..most - 1 {
        tree.link(node, ROOT, &name(at), NOW).expect("linked");
    }
    assert_eq!(tree.link(node, ROOT, b"one too many", NOW), Err(Errno::NOSPC));
    assert_eq!(tree.make(ROOT, b"a file too many", new(FILE), NOW), Err(Errno::NOSPC));
    tree.rename((ROOT, &name(0)), (ROOT, b"another"), 0, NOW).expect("renamed");
    tree.rename((ROOT, &name(1)), (ROOT, b"another"), 0, NOW).expect("of the same node: nothing happens");
    tree.unlink(ROOT, b"another", NOW).expect("unlinked");
    tree.make(ROOT, b"in its place", new(FILE), NOW).expect("made");
    assert_eq!(tree.link(node, ROOT, b"one too many", NOW), Err(Errno::NOSPC));
}

#[test]
fn listings_go_on_where_they_were_whatever_happens_meanwhile() {
    let mut tree = Tree::new(10, (0, 0), 0o755, NOW);
    for name in [b"one", b"two", b"six"] {
        tree.make(ROOT, name, new(FILE), NOW).unwrap();
    }
    let first: Vec<_> =
        tree.list(ROOT, 0).unwrap().take(3).map(|entry| (entry.name.to_vec(), entry.cookie)).collect();
    assert_eq!(first.iter().map(|(name, _)| &name[..]).collect::<Vec<_>>(), [&b"."[..], b"..", b"one"]);
    tree.unlink(ROOT, b"one", NOW).unwrap();
    tree.make(ROOT, b"new", new(FILE), NOW).unwrap();
    let rest: Vec<_> = tree.list(ROOT, first[2].1).unwrap().map(|entry| entry.name.to_vec()).collect();
    assert_eq!(rest, [&b"two"[..], b"six", b"new"]);
}

#[test]
fn holes_and_data_are_found_in_files_of_any_length() {
    let mut tree = Tree::new(100, (0, 0), 0o755, NOW);
    let node = tree.make(ROOT, b"sparse", new(FILE), NOW).unwrap();
    let far = 1 << 40;
    tree.resize(node, far, NOW).unwrap();
    assert_eq!((tree.seek(node, 5, true), tree.seek(node, 5, false)), (Err(Errno::NXIO), Ok(5)));
    let page = 1 << 26;
    tree.reserve(node, page..page + 2).unwrap();
    assert_eq!(tree.seek(node, 5, true), Ok(page * 4096));
    assert_eq!(tree.seek(node, page * 4096 + 9, true), Ok(page * 4096 + 9));
    assert_eq!(tree.seek(node, page * 4096 + 9, false), Ok((page + 2) * 4096));
    assert_eq!(tree.seek(node, far, false), Err(Errno::NXIO));
    assert_eq!(tree.resize(node, SIZE_MAX + 1, NOW), Err(Errno::FBIG));
}
