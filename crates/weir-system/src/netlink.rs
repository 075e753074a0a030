//! Generic netlink, as far as the kernel's NBD client needs it (include/uapi/linux/netlink.h,
//! genetlink.h): one request, its answers, and the final acknowledgement; and the events of a
//! multicast group.

use rustix::net::netlink::{GENERIC, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};

const HEADER: usize = 16;
const GENERIC_HEADER: usize = 4;
const ATTRIBUTE_HEADER: usize = 4;

const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLMSG_ERROR: u16 = 2;
const NLA_F_NESTED: u16 = 1 << 15;
const NLA_TYPE_MASK: u16 = 0x3fff;

const GENL_ID_CTRL: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
const CTRL_ATTR_MCAST_GROUPS: u16 = 7;
const CTRL_ATTR_MCAST_GRP_NAME: u16 = 1;
const CTRL_ATTR_MCAST_GRP_ID: u16 = 2;

/// Bytes of the longest answer; the kernel's are a few hundred bytes.
const ANSWER_MOST: usize = 8192;

/// A list of attributes: type, length, content, each padded to four bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Attributes(Vec<u8>);

impl Attributes {
    /// Adds an attribute with these bytes as its content.
    pub fn bytes(mut self, kind: u16, content: &[u8]) -> Self {
        let length = (ATTRIBUTE_HEADER + content.len()) as u16;
        self.0.extend_from_slice(&length.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    /// Adds an attribute with a 32-bit number.
    pub fn u32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// Adds an attribute with a 64-bit number.
    pub fn u64(self, kind: u16, value: u64) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// Adds an attribute with a list of attributes.
    pub fn nested(self, kind: u16, content: &Attributes) -> Self {
        self.bytes(kind | NLA_F_NESTED, &content.0)
    }
}

/// The attributes of a list, type and content, as far as the list is complete.
fn attributes(mut list: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (header, _) = list.split_first_chunk::<ATTRIBUTE_HEADER>()?;
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let kind = u16::from_ne_bytes([header[2], header[3]]) & NLA_TYPE_MASK;
        let content = list.get(ATTRIBUTE_HEADER..length)?;
        list = list.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, content))
    })
}

/// The content of the attribute `wanted` in a list, if it is there and the list is complete that
/// far.
fn find(list: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(list).find(|(kind, _)| *kind == wanted).map(|(_, content)| content)
}

/// The number of a family's multicast group, in the kernel's answer about the family.
fn group_in(family: &[u8], name: &[u8]) -> Option<u32> {
    attributes(find(family, CTRL_ATTR_MCAST_GROUPS)?)
        .find(|(_, group)| find(group, CTRL_ATTR_MCAST_GRP_NAME) == Some(name))
        .and_then(|(_, group)| u32_in(group, CTRL_ATTR_MCAST_GRP_ID))
}

/// The attribute `wanted` in the attributes that [`Family::call`] or an event has brought, as a
/// 32-bit number.
pub fn u32_in(list: &[u8], wanted: u16) -> Option<u32> {
    find(list, wanted)?.try_into().ok().map(u32::from_ne_bytes)
}

fn request(family: u16, sequence: u32, command: u8, version: u8, attributes: &Attributes) -> Vec<u8> {
    let length = (HEADER + GENERIC_HEADER + attributes.0.len()) as u32;
    let mut message = Vec::with_capacity(length as usize);
    message.extend_from_slice(&length.to_ne_bytes());
    message.extend_from_slice(&family.to_ne_bytes());
    message.extend_from_slice(&(NLM_F_REQUEST | NLM_F_ACK).to_ne_bytes());
    message.extend_from_slice(&sequence.to_ne_bytes());
    message.extend_from_slice(&0u32.to_ne_bytes()); // the port is for the kernel to fill in
    message.extend_from_slice(&[command, version, 0, 0]);
    message.extend_from_slice(&attributes.0);
    message
}

/// One message of the kernel's answer.
#[derive(Debug)]
enum Message<'a> {
    /// The end of an answer: 0 or a negative error number.
    End(i32),
    /// The attributes of an answer.
    Answer(&'a [u8]),
}

/// Splits the bytes that the kernel sent into messages. Leaves out those that do not answer request
/// `sequence`.
fn messages(mut bytes: &[u8], sequence: u32) -> io::Result<Vec<Message<'_>>> {
    let broken = || io::Error::new(io::ErrorKind::InvalidData, "the kernel's netlink answer is cut short");
    let mut messages = Vec::new();
    while !bytes.is_empty() {
        let header = bytes.first_chunk::<HEADER>().ok_or_else(broken)?;
        let word =
            |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let length = word(0) as usize;
        let content = bytes.get(HEADER..length).ok_or_else(broken)?;
        if word(8) == sequence {
            if u16::from_ne_bytes([header[4], header[5]]) == NLMSG_ERROR {
                let code = content.first_chunk::<4>().ok_or_else(broken)?;
                messages.push(Message::End(i32::from_ne_bytes(*code)));
            } else {
                messages.push(Message::Answer(content.get(GENERIC_HEADER..).ok_or_else(broken)?));
            }
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(messages)
}

/// A connection to one family of the kernel's generic netlink.
#[derive(Debug)]
pub struct Family {
    socket: OwnedFd,
    id: u16,
    version: u8,
    sequence: u32,
}

impl Family {
    /// Finds the family `name`; the kernel loads its module if it can.
    ///
    /// # Errors
    /// Fails with `ENOENT` if the kernel has no family of this name.
    pub fn open(name: &str, version: u8) -> io::Result<Self> {
        let (control, answer) = Self::about(name)?;
        let id = find(&answer, CTRL_ATTR_FAMILY_ID).and_then(|id| id.try_into().ok());
        let id = u16::from_ne_bytes(id.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?);
        Ok(Family { id, version, ..control })
    }

    /// Asks the kernel's control family about another family.
    fn about(name: &str) -> io::Result<(Family, Vec<u8>)> {
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(GENERIC))?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        let mut control = Family { socket, id: GENL_ID_CTRL, version: 2, sequence: 0 };
        let name = Attributes::default().bytes(CTRL_ATTR_FAMILY_NAME, &[name.as_bytes(), &[0]].concat());
        let answer = control.call(CTRL_CMD_GETFAMILY, &name)?;
        Ok((control, answer))
    }

    /// Sends a command and returns the attributes of the kernel's answer. They are empty if the
    /// kernel only acknowledged the command.
    ///
    /// # Errors
    /// Fails with the kernel's error.
    pub fn call(&mut self, command: u8, attributes: &Attributes) -> io::Result<Vec<u8>> {
        self.sequence += 1;
        let message = request(self.id, self.sequence, command, self.version, attributes);
        rustix::net::sendto(&self.socket, &message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
        let mut answer = Vec::new();
        let mut buffer = vec![0; ANSWER_MOST];
        loop {
            let (received, _) = rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
            for message in messages(&buffer[..received], self.sequence)? {
                match message {
                    Message::Answer(content) => answer = content.to_vec(),
                    Message::End(0) => return Ok(answer),
                    Message::End(error) => return Err(io::Error::from_raw_os_error(error.saturating_neg())),
                }
            }
        }
    }
}

/// Receives the events that a family sends to a multicast group.
#[derive(Debug)]
pub struct Events(OwnedFd);

impl Events {
    /// Joins a multicast group of a family.
    ///
    /// # Errors
    /// Fails with `ENOENT` if the kernel has no such family or group.
    pub fn join(family: &str, group: &str) -> io::Result<Self> {
        let (control, answer) = Family::about(family)?;
        let group = group_in(&answer, &[group.as_bytes(), &[0]].concat());
        let group: u32 = group.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?;
        // SAFETY: the option takes a 32-bit number, which is read and not stored.
        let joined = unsafe {
            libc::setsockopt(
                control.socket.as_raw_fd(),
                libc::SOL_NETLINK,
                libc::NETLINK_ADD_MEMBERSHIP,
                (&raw const group).cast(),
                size_of::<u32>() as libc::socklen_t,
            )
        };
        if joined < 0 { Err(io::Error::last_os_error()) } else { Ok(Events(control.socket)) }
    }

    /// Hands over the attributes of every event that waits.
    ///
    /// # Errors
    /// Fails with `ENOBUFS` when some events were lost.
    pub fn take(&self, mut event: impl FnMut(&[u8])) -> io::Result<()> {
        let mut buffer = [0; ANSWER_MOST];
        loop {
            match rustix::net::recv(&self.0, &mut buffer[..], RecvFlags::DONTWAIT) {
                Ok((received, _)) => {
                    for message in messages(&buffer[..received], 0)? {
                        if let Message::Answer(content) = message {
                            event(content);
                        }
                    }
                }
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_and_found_again() {
        let inner = Attributes::default().u32(1, 7).u32(1, 8);
        let list = Attributes::default().bytes(9, b"nbd\0x").u64(2, 1 << 40).nested(7, &inner).u32(1, 5);
        assert_eq!(list.0.len() % 4, 0);
        assert_eq!(find(&list.0, 9), Some(&b"nbd\0x"[..]));
        assert_eq!(u32_in(&list.0, 1), Some(5));
        assert_eq!(find(&list.0, 7).and_then(|inner| u32_in(inner, 1)), Some(7));
        assert_eq!(u32_in(&list.0, 2), None, "eight bytes are not a 32-bit number");
        assert_eq!(find(&list.0, 3), None);
    }

    #[test]
    fn an_answer_that_is_cut_short_is_no_answer() {
        for bytes in [&[0; HEADER - 1][..], &[255; HEADER][..]] {
            let Err(error) = messages(bytes, 1) else { panic!("it is cut short") };
            assert_eq!(error.to_string(), "the kernel's netlink answer is cut short");
        }
    }

    #[test]
    fn a_group_is_found_by_its_name_among_others() {
        let group = |name: &[u8], number| {
            let group = Attributes::default().bytes(CTRL_ATTR_MCAST_GRP_NAME, name);
            group.u32(CTRL_ATTR_MCAST_GRP_ID, number)
        };
        let groups =
            Attributes::default().nested(1, &group(b"other\0", 4)).nested(2, &group(b"nbd_mc_group\0", 7));
        let family = Attributes::default().u32(1, 9).nested(CTRL_ATTR_MCAST_GROUPS, &groups);
        assert_eq!(group_in(&family.0, b"nbd_mc_group\0"), Some(7));
        assert_eq!(group_in(&family.0, b"nbd_mc\0"), None);
        assert_eq!(group_in(&groups.0, b"nbd_mc_group\0"), None);
    }

    #[test]
    fn the_control_familys_own_group_can_be_joined_and_tells_nothing_by_itself() {
        let events = Events::join("nlctrl", "notify").expect("every kernel has it");
        events.take(|event| panic!("{event:?}")).expect("nothing waits");
        let error = Events::join("nlctrl", "weir-has-none").expect_err("no such group");
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
    }

    #[test]
    fn no_list_however_broken_is_read_beyond_its_end() {
        let list = Attributes::default().bytes(9, b"nbd").u32(1, 5);
        for end in 0..list.0.len() {
            let _ = find(&list.0[..end], 1);
        }
        assert_eq!(find(&[0, 0, 0, 0], 1), None, "a length of zero does not go on for ever");
        assert_eq!(find(&[255, 255, 1, 0], 1), None);
    }

    #[test]
    fn an_answer_is_its_attributes_and_the_acknowledgement_ends_it() {
        let attributes = Attributes::default().u32(1, 3);
        let mut bytes = request(0x1d, 4, 1, 1, &attributes);
        let mut end = request(NLMSG_ERROR, 4, 0, 0, &Attributes::default());
        end[16..20].copy_from_slice(&(-libc::EBUSY).to_ne_bytes());
        bytes.extend_from_slice(&end);
        match &messages(&bytes, 4).expect("whole")[..] {
            [Message::Answer(answer), Message::End(code)] => {
                assert_eq!((u32_in(answer, 1), *code), (Some(3), -libc::EBUSY));
            }
            other => panic!("{other:?}"),
        }
        assert!(messages(&bytes, 5).expect("whole").is_empty(), "answers to others are passed over");
        assert!(messages(&bytes[..30], 4).is_err());
    }

    #[test]
    fn the_kernel_knows_its_own_control_family_and_not_a_made_up_one() {
        assert_eq!(Family::open("nlctrl", 2).expect("every kernel has it").id, GENL_ID_CTRL);
        let error = Family::open("weir-has-none", 1).expect_err("no such family");
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
    }
}
