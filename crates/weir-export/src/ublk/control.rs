//! Control commands to the ublk driver: one at a time, through an io_uring of their own, whose
//! 128-byte entries carry the command.

use super::uapi::{self, CONTROL_PATH, ControlCommand, NO_QUEUE, Plain};
use io_uring::{IoUring, opcode, squeue::Entry128, types::Fd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// The reason why the driver refused.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The driver is not loaded.
    #[error(
        "this kernel has no ublk driver loaded ({CONTROL_PATH} is missing): run modprobe ublk_drv, or see weir doctor"
    )]
    Missing,
    /// The driver denies access to this user.
    #[error("{CONTROL_PATH} cannot be opened: run as root")]
    Denied(#[source] io::Error),
    /// The kernel is older than Linux 6.5.
    #[error("the kernel's ublk driver is too old to say what it can do: use Linux 6.5 or newer")]
    TooOld(#[source] io::Error),
    /// The system gives no io_uring for the commands.
    #[error("no io_uring for the ublk driver: {}", ring_advice(.0))]
    Ring(#[source] io::Error),
    /// The driver refused a command.
    #[error("ublk device {device}: {command} was refused{}", advice(.source))]
    Refused {
        /// The command's name.
        command: &'static str,
        /// The device that the command was for.
        device: String,
        /// The error that the driver gave.
        #[source]
        source: io::Error,
    },
}

fn ring_advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => "it is switched off; sysctl kernel.io_uring_disabled=0",
        Some(libc::ENOSYS) => "the kernel has none",
        _ => "no memory or descriptors for it",
    }
}

fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => ": run as root with CAP_SYS_ADMIN",
        Some(libc::EBUSY) => ": somebody uses it",
        Some(libc::ENODEV) => ": there is no such device",
        _ => "",
    }
}

/// The receiver of control commands: the kernel's driver, or a test's fake.
pub trait Driver {
    /// Does one command, which reads or fills `buffer`.
    ///
    /// # Errors
    /// Fails with the driver's error number.
    fn call(&mut self, command: u32, argument: ControlCommand, buffer: &mut [u8]) -> io::Result<()>;
}

/// The kernel's driver.
pub struct Control {
    ring: IoUring<Entry128>,
    driver: OwnedFd,
    features: u64,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("features", &self.features).finish_non_exhaustive()
    }
}

impl Control {
    /// Opens the driver and asks for its features.
    ///
    /// # Errors
    /// Fails when the driver is missing, denied or too old.
    pub fn open() -> Result<Control, ControlError> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let driver = rustix::fs::open(CONTROL_PATH, flags, Mode::empty()).map_err(|errno| match errno {
            Errno::NOENT | Errno::NXIO | Errno::NODEV => ControlError::Missing,
            errno => ControlError::Denied(errno.into()),
        })?;
        let ring = IoUring::<Entry128>::builder().build(2).map_err(ControlError::Ring)?;
        let mut control = Control { ring, driver, features: 0 };
        let mut features = [0; 8];
        let none = ControlCommand { device: uapi::ANY_DEVICE, queue: NO_QUEUE, ..ControlCommand::default() };
        control.call(uapi::GET_FEATURES, none, &mut features).map_err(|error| {
            match error.raw_os_error() {
                Some(libc::EPERM | libc::EACCES) => ControlError::Denied(error),
                _ => ControlError::TooOld(error),
            }
        })?;
        control.features = u64::from_ne_bytes(features);
        Ok(control)
    }

    /// The driver's features: `FEATURE_` bits.
    pub fn features(&self) -> u64 {
        self.features
    }
}

impl Driver for Control {
    fn call(&mut self, command: u32, argument: ControlCommand, buffer: &mut [u8]) -> io::Result<()> {
        let argument = ControlCommand {
            address: if buffer.is_empty() { 0 } else { buffer.as_mut_ptr() as u64 },
            length: buffer.len() as u16,
            ..argument
        };
        let mut bytes = [0; 80];
        bytes[..size_of::<ControlCommand>()].copy_from_slice(argument.bytes());
        let entry = opcode::UringCmd80::new(Fd(self.driver.as_raw_fd()), command).cmd(bytes).build();
        // SAFETY: the descriptor and the buffer outlive the command. It has completed when this
        // function returns, since only its completion ends the loop.
        unsafe { self.ring.submission().push(&entry) }.expect("one command at a time in a ring of two");
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // If io_uring_enter fails, either the command has not begun, or its end will never
                // be reported. Nobody can tell which, so it is not safe to go on.
                Err(error) => panic!("io_uring_enter on the ublk control ring: {error}"),
            }
            if let Some(completion) = self.ring.completion().next() {
                return match completion.result() {
                    error if error < 0 => Err(io::Error::from_raw_os_error(-error)),
                    _ => Ok(()),
                };
            }
        }
    }
}
