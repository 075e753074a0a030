//! The sequences of commands that make a device, take one over from a dead server, and remove it.

use super::control::{ControlError, Driver};
use super::uapi::{
    self, ANY_DEVICE, ATTRIBUTE_VOLATILE_CACHE, BasicParameters, ControlCommand, DeviceInfo,
    DiscardParameters, FEATURE_SAFE_STOP, FEATURE_USER_RECOVERY, FEATURE_USER_RECOVERY_REISSUE, NO_QUEUE,
    PAGE_SECTORS, PARAMETERS_BASIC, PARAMETERS_DISCARD, Parameters, Plain, SECTOR,
};
use std::fmt;
use std::io;
use weir_core::PAGE_SIZE;

/// The longest discard, in sectors. The request engine discards pages in steps, and takes other
/// requests in between.
const DISCARD_SECTORS: u32 = (256 << 20) / SECTOR as u32;

/// The mark of Weir's devices, in a field that the driver stores for servers. The lower half of the
/// field is the id of the process that made the device.
const MARK: u64 = 0x7765_6972 << 32;

/// The parameters of a new device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// The device's size in pages.
    pub pages: u32,
    /// Number of hardware queues.
    pub queues: u16,
    /// Largest number of requests in flight at each queue.
    pub depth: u16,
    /// Bytes of the longest request.
    pub request_bytes: u32,
    /// Whether the device outlives its server.
    pub recoverable: bool,
    /// Whether pages can be discarded and zeroed.
    pub clears: bool,
    /// Whether an acknowledged write is safe only after a flush.
    pub flushes: bool,
}

impl Shape {
    fn info(&self, features: u64) -> DeviceInfo {
        let recovery = FEATURE_USER_RECOVERY | FEATURE_USER_RECOVERY_REISSUE;
        DeviceInfo {
            queues: self.queues,
            depth: self.depth,
            buffer_bytes: self.request_bytes,
            device: ANY_DEVICE,
            flags: uapi::FEATURE_IOCTL_ENCODE | if self.recoverable { recovery & features } else { 0 },
            mark: MARK | u64::from(std::process::id()),
            ..DeviceInfo::default()
        }
    }

    fn parameters(&self) -> Parameters {
        let page_shift = PAGE_SIZE.ilog2() as u8;
        Parameters {
            length: size_of::<Parameters>() as u32,
            types: PARAMETERS_BASIC | if self.clears { PARAMETERS_DISCARD } else { 0 },
            basic: BasicParameters {
                // The kernel sends flushes to a device with a volatile cache, also after each write
                // that must be safe at once (FUA). A page device that cannot flush needs none: its
                // acknowledged pages are already as safe as they can be.
                attributes: if self.flushes { ATTRIBUTE_VOLATILE_CACHE } else { 0 },
                logical_shift: page_shift,
                physical_shift: page_shift,
                optimal_shift: self.request_bytes.ilog2() as u8,
                minimal_shift: page_shift,
                max_sectors: self.request_bytes / SECTOR as u32,
                device_sectors: u64::from(self.pages) * PAGE_SECTORS,
                ..BasicParameters::default()
            },
            discard: if self.clears {
                DiscardParameters {
                    granularity: PAGE_SIZE as u32,
                    max_discard_sectors: DISCARD_SECTORS,
                    max_zeroes_sectors: DISCARD_SECTORS,
                    max_segments: 1,
                    ..DiscardParameters::default()
                }
            } else {
                DiscardParameters::default()
            },
            ..Parameters::default()
        }
    }
}

/// A device of the driver, by its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Device(pub u32);

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/dev/ublkb{}", self.0)
    }
}

impl Device {
    /// The path of the character device, through which requests come.
    pub fn character(self) -> String {
        format!("/dev/ublkc{}", self.0)
    }

    /// Makes a device that is not started yet. `made` gets the device as soon as the driver has
    /// made it, before a later step can fail.
    ///
    /// # Errors
    /// Fails with the driver's refusal. No device is left then.
    pub fn add(
        driver: &mut impl Driver,
        features: u64,
        shape: &Shape,
        made: impl FnOnce(Device),
    ) -> Result<(Device, DeviceInfo), ControlError> {
        let mut info = shape.info(features);
        let wished = info.flags;
        call(driver, "ADD_DEV", uapi::ADD_DEV, None, 0, info.bytes_mut())?;
        let device = Device(info.device);
        made(device);
        let fine = set_up(driver, device, shape).and_then(|()| {
            let recovery = FEATURE_USER_RECOVERY | FEATURE_USER_RECOVERY_REISSUE;
            // The driver clears the bits of features that it does not grant. A device that must
            // survive its server needs both of these features.
            if wished & recovery & !info.flags == 0 {
                return Ok(());
            }
            Err(refused("ADD_DEV", Some(device), io::Error::from_raw_os_error(libc::EOPNOTSUPP)))
        });
        match fine {
            Ok(()) => Ok((device, info)),
            Err(error) => {
                let _ = device.forget(driver);
                Err(error)
            }
        }
    }

    /// The device's state and parameters.
    ///
    /// # Errors
    /// Fails with `ENODEV` if there is no device of this number.
    pub fn info(self, driver: &mut impl Driver) -> Result<DeviceInfo, ControlError> {
        let mut info = DeviceInfo::default();
        call(driver, "GET_DEV_INFO", uapi::GET_DEV_INFO, Some(self), 0, info.bytes_mut())?;
        Ok(info)
    }

    /// Publishes the block device. The command ends only if every request of every queue has been
    /// fetched.
    ///
    /// # Errors
    /// Fails with the driver's refusal.
    pub fn start(self, driver: &mut impl Driver) -> Result<(), ControlError> {
        let process = u64::from(std::process::id());
        call(driver, "START_DEV", uapi::START_DEV, Some(self), process, &mut [])
    }

    /// Begins to take a device over from a dead server. The driver may still be clearing up:
    /// `again` waits a little and says whether to try again. Returns `None` if there is nothing to
    /// take over, because the device has gone or never started.
    ///
    /// # Errors
    /// Fails with the driver's refusal, and with `EBUSY` when `again` gave up.
    pub fn begin_recovery(
        self,
        driver: &mut impl Driver,
        mut again: impl FnMut() -> bool,
    ) -> Result<Option<DeviceInfo>, ControlError> {
        loop {
            let info = match self.info(driver) {
                Err(ControlError::Refused { source, .. }) if source.raw_os_error() == Some(libc::ENODEV) => {
                    return Ok(None);
                }
                info => info?,
            };
            if info.mark >> 32 != MARK >> 32 {
                // The number belongs to another device by now: numbers are used again.
                return Ok(None);
            }
            if info.state == uapi::STATE_DEAD {
                self.forget(driver)?;
                return Ok(None);
            }
            let begun =
                call(driver, "START_USER_RECOVERY", uapi::START_USER_RECOVERY, Some(self), 0, &mut []);
            match begun {
                Err(ControlError::Refused { ref source, .. })
                    if source.raw_os_error() == Some(libc::EBUSY) && again() => {}
                // A server died during its takeover, before it had offered any buffer. The takeover
                // that it began still goes on. The driver refuses to begin another, and waits until
                // the queues fetch requests.
                Err(ControlError::Refused { ref source, .. })
                    if source.raw_os_error() == Some(libc::EINVAL) && info.state == uapi::STATE_QUIESCED =>
                {
                    return Ok(Some(info));
                }
                begun => return begun.map(|()| Some(info)),
            }
        }
    }

    /// Ends the takeover, after which the driver hands out requests again. All requests must have
    /// been fetched, as for [`start`](Device::start).
    ///
    /// # Errors
    /// Fails with the driver's refusal.
    pub fn end_recovery(self, driver: &mut impl Driver) -> Result<(), ControlError> {
        let process = u64::from(std::process::id());
        call(driver, "END_USER_RECOVERY", uapi::END_USER_RECOVERY, Some(self), process, &mut [])
    }

    /// Removes the block device, which ends the fetches for which the queue threads wait. If the
    /// driver can tell that a program has the device open, the device stays, and this returns
    /// false. A device that is gone already is no error.
    ///
    /// # Errors
    /// Fails if the driver refuses for another reason.
    pub fn stop(self, driver: &mut impl Driver, features: u64) -> Result<bool, ControlError> {
        let (name, command) = if features & FEATURE_SAFE_STOP == 0 {
            ("STOP_DEV", uapi::STOP_DEV)
        } else {
            ("TRY_STOP_DEV", uapi::TRY_STOP_DEV)
        };
        match call(driver, name, command, Some(self), 0, &mut []) {
            Err(ControlError::Refused { ref source, .. }) if source.raw_os_error() == Some(libc::EBUSY) => {
                Ok(false)
            }
            Err(ControlError::Refused { ref source, .. }) if source.raw_os_error() == Some(libc::ENODEV) => {
                Ok(true)
            }
            stopped => stopped.map(|()| true),
        }
    }

    /// Gives up a device that was never published, or that was stopped. That ends the fetches for
    /// which the queue threads wait.
    ///
    /// # Errors
    /// Fails with the driver's refusal.
    pub fn abandon(self, driver: &mut impl Driver) -> Result<(), ControlError> {
        call(driver, "STOP_DEV", uapi::STOP_DEV, Some(self), 0, &mut [])
    }

    /// Removes a stopped device. Returns once its character device has been closed everywhere.
    ///
    /// # Errors
    /// Fails with the driver's refusal.
    pub fn forget(self, driver: &mut impl Driver) -> Result<(), ControlError> {
        call(driver, "DEL_DEV", uapi::DEL_DEV, Some(self), 0, &mut [])
    }

    /// The processors whose requests come to `queue`, as a mask of 1024 bits.
    ///
    /// # Errors
    /// Fails with the driver's refusal.
    pub fn affinity(self, driver: &mut impl Driver, queue: u16) -> Result<[u8; 128], ControlError> {
        let mut mask = [0; 128];
        let queue = u64::from(queue);
        call(driver, "GET_QUEUE_AFFINITY", uapi::GET_QUEUE_AFFINITY, Some(self), queue, &mut mask)?;
        Ok(mask)
    }

    /// Removes the device if a dead server of Weir's left it: it has Weir's mark, is stopped, and
    /// the process that made it is gone, as `lives` says. Returns whether it removed the device.
    pub fn clear_up(self, driver: &mut impl Driver, lives: impl Fn(u32) -> bool) -> bool {
        let Ok(info) = self.info(driver) else { return false };
        let ours = info.mark >> 32 == MARK >> 32 && info.state == uapi::STATE_DEAD;
        ours && !lives(info.mark as u32) && self.forget(driver).is_ok()
    }
}

fn set_up(driver: &mut impl Driver, device: Device, shape: &Shape) -> Result<(), ControlError> {
    call(driver, "SET_PARAMS", uapi::SET_PARAMS, Some(device), 0, shape.parameters().bytes_mut())
}

fn call(
    driver: &mut impl Driver,
    name: &'static str,
    command: u32,
    device: Option<Device>,
    data: u64,
    buffer: &mut [u8],
) -> Result<(), ControlError> {
    let argument = ControlCommand {
        device: device.map_or(ANY_DEVICE, |device| device.0),
        queue: NO_QUEUE,
        data,
        ..ControlCommand::default()
    };
    driver.call(command, argument, buffer).map_err(|source| refused(name, device, source))
}

fn refused(command: &'static str, device: Option<Device>, source: io::Error) -> ControlError {
    let device = device.map_or_else(|| "(new)".to_owned(), |device| device.to_string());
    ControlError::Refused { command, device, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uapi::{FEATURE_IOCTL_ENCODE, STATE_DEAD, STATE_LIVE, STATE_QUIESCED};

    const RECOVERY: u64 = FEATURE_USER_RECOVERY | FEATURE_USER_RECOVERY_REISSUE;
    const SHAPE: Shape = Shape {
        pages: 1000,
        queues: 2,
        depth: 64,
        request_bytes: 128 << 10,
        recoverable: true,
        clears: true,
        flushes: false,
    };

    /// A fake driver with one device. It refuses the commands that the kernel's driver refuses.
    #[derive(Default)]
    struct Fake {
        info: Option<DeviceInfo>,
        parameters: Option<Parameters>,
        open: bool,
        /// The feature bits that the driver grants.
        grants: u64,
        /// Number of recoveries that still fail, because requests of the dead server are left.
        remains: u32,
        calls: Vec<u32>,
    }

    fn refuse(errno: i32) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(errno))
    }

    impl Driver for Fake {
        fn call(&mut self, command: u32, argument: ControlCommand, buffer: &mut [u8]) -> io::Result<()> {
            self.calls.push(command);
            assert_eq!(argument.queue, NO_QUEUE);
            if command == uapi::ADD_DEV {
                assert_eq!(argument.device, ANY_DEVICE);
                let mut info = DeviceInfo::default();
                info.bytes_mut().copy_from_slice(buffer);
                (info.device, info.state, info.flags) = (7, STATE_DEAD, info.flags & self.grants);
                buffer.copy_from_slice(info.bytes());
                self.info = Some(info);
                return Ok(());
            }
            let Some(info) = self.info.as_mut().filter(|_| argument.device == 7) else {
                return refuse(libc::ENODEV);
            };
            match command {
                uapi::GET_DEV_INFO => buffer.copy_from_slice(info.bytes()),
                uapi::SET_PARAMS if info.state == STATE_DEAD => {
                    let mut parameters = Parameters::default();
                    parameters.bytes_mut().copy_from_slice(buffer);
                    self.parameters = Some(parameters);
                }
                uapi::START_DEV if self.parameters.is_some() && info.state == STATE_DEAD => {
                    (info.state, info.server) = (STATE_LIVE, argument.data as i32);
                }
                uapi::START_USER_RECOVERY if self.remains > 0 => {
                    self.remains -= 1;
                    return refuse(libc::EBUSY);
                }
                uapi::START_USER_RECOVERY if info.state == STATE_QUIESCED => {}
                uapi::END_USER_RECOVERY if info.state == STATE_QUIESCED => {
                    (info.state, info.server) = (STATE_LIVE, argument.data as i32);
                }
                uapi::TRY_STOP_DEV if self.open => return refuse(libc::EBUSY),
                uapi::STOP_DEV | uapi::TRY_STOP_DEV => info.state = STATE_DEAD,
                uapi::DEL_DEV if info.state == STATE_DEAD => self.info = None,
                _ => return refuse(libc::EINVAL),
            }
            Ok(())
        }
    }

    fn fake() -> Fake {
        Fake { grants: RECOVERY | FEATURE_IOCTL_ENCODE, ..Fake::default() }
    }

    #[test]
    fn a_device_is_made_with_its_shape_and_started_for_this_process() {
        let mut driver = fake();
        let mut told = None;
        let (device, info) =
            Device::add(&mut driver, RECOVERY, &SHAPE, |device| told = Some(device)).unwrap();
        assert_eq!((device, told, device.to_string()), (Device(7), Some(device), "/dev/ublkb7".to_owned()));
        assert_eq!((info.queues, info.depth, info.buffer_bytes), (2, 64, 131_072));
        assert_eq!(info.flags & RECOVERY, RECOVERY);
        let parameters = driver.parameters.unwrap();
        assert_eq!((parameters.length, parameters.types), (64, 3));
        assert_eq!((parameters.basic.device_sectors, parameters.basic.max_sectors), (8000, 256));
        assert_eq!((parameters.basic.logical_shift, parameters.discard.granularity), (12, 4096));
        device.start(&mut driver).unwrap();
        let info = device.info(&mut driver).unwrap();
        assert_eq!((info.state, info.server), (STATE_LIVE, std::process::id() as i32));
        device.stop(&mut driver, 0).unwrap();
        device.forget(&mut driver).unwrap();
        assert_eq!(
            driver.calls,
            [
                uapi::ADD_DEV,
                uapi::SET_PARAMS,
                uapi::START_DEV,
                uapi::GET_DEV_INFO,
                uapi::STOP_DEV,
                uapi::DEL_DEV
            ]
        );
    }

    #[test]
    fn a_device_that_must_be_flushed_says_so_and_one_that_cannot_discard_offers_no_discards() {
        let made = |shape: &Shape| {
            let mut driver = fake();
            Device::add(&mut driver, RECOVERY, shape, drop).unwrap();
            driver.parameters.unwrap()
        };
        let plain = made(&SHAPE);
        assert_eq!((plain.basic.attributes, plain.types), (0, 3));
        assert!(plain.discard.max_discard_sectors > 0 && plain.discard.max_zeroes_sectors > 0);
        let cache = made(&Shape { clears: false, flushes: true, ..SHAPE });
        // UBLK_ATTR_VOLATILE_CACHE and UBLK_PARAM_TYPE_BASIC of the kernel's header.
        assert_eq!((cache.basic.attributes, cache.types), (1 << 2, 1));
        assert_eq!(cache.discard, DiscardParameters::default());
    }

    #[test]
    fn a_device_that_would_not_survive_its_server_is_not_left_behind() {
        let mut driver = Fake { grants: FEATURE_IOCTL_ENCODE, ..Fake::default() };
        let error = Device::add(&mut driver, RECOVERY, &SHAPE, drop).unwrap_err();
        assert_eq!(error.to_string(), "ublk device /dev/ublkb7: ADD_DEV was refused");
        assert!(driver.info.is_none());
        let shape = Shape { recoverable: false, ..SHAPE };
        let (_, info) = Device::add(&mut driver, RECOVERY, &shape, drop).unwrap();
        assert_eq!(info.flags & RECOVERY, 0);
    }

    #[test]
    fn a_dead_servers_device_is_taken_over_when_the_driver_is_done_with_it() {
        let mut driver = fake();
        let (device, _) = Device::add(&mut driver, RECOVERY, &SHAPE, drop).unwrap();
        device.start(&mut driver).unwrap();
        driver.info.as_mut().unwrap().state = STATE_QUIESCED;
        driver.remains = 3;
        let mut waits = 0;
        let info = device.begin_recovery(&mut driver, || {
            waits += 1;
            true
        });
        assert_eq!((info.unwrap().unwrap().queues, waits), (2, 3));
        device.end_recovery(&mut driver).unwrap();
        assert_eq!(device.info(&mut driver).unwrap().state, STATE_LIVE);

        driver.info.as_mut().unwrap().state = STATE_QUIESCED;
        driver.remains = 1;
        let error = device.begin_recovery(&mut driver, || false).unwrap_err();
        assert!(error.to_string().contains("START_USER_RECOVERY"), "{error}");
    }

    #[test]
    fn what_is_gone_never_started_or_somebody_elses_is_not_taken_over() {
        let mut driver = fake();
        assert_eq!(Device(7).begin_recovery(&mut driver, || true).unwrap(), None, "gone");
        let (device, _) = Device::add(&mut driver, RECOVERY, &SHAPE, drop).unwrap();
        assert_eq!(device.begin_recovery(&mut driver, || true).unwrap(), None, "never started");
        assert!(driver.info.is_none(), "and removed");
        let (device, _) = Device::add(&mut driver, RECOVERY, &SHAPE, drop).unwrap();
        device.start(&mut driver).unwrap();
        driver.info.as_mut().unwrap().mark = 0;
        assert_eq!(device.begin_recovery(&mut driver, || true).unwrap(), None, "somebody else's");
        assert!(driver.info.is_some());
    }

    #[test]
    fn an_open_device_stays_where_the_driver_can_tell() {
        let mut driver = Fake { open: true, ..fake() };
        let (device, _) = Device::add(&mut driver, RECOVERY, &SHAPE, drop).unwrap();
        device.start(&mut driver).unwrap();
        assert!(!device.stop(&mut driver, FEATURE_SAFE_STOP).unwrap());
        assert_eq!(device.info(&mut driver).unwrap().state, STATE_LIVE);
        driver.open = false;
        assert!(device.stop(&mut driver, FEATURE_SAFE_STOP).unwrap(), "once it is closed");
        device.forget(&mut driver).unwrap();
        assert!(device.stop(&mut driver, FEATURE_SAFE_STOP).unwrap(), "gone already");
    }

    #[test]
    fn only_what_a_dead_server_of_ours_left_is_cleared_up() {
        let mut driver = fake();
        let (device, _) = Device::add(&mut driver, RECOVERY, &SHAPE, drop).unwrap();
        assert!(!device.clear_up(&mut driver, |process| process == std::process::id()));
        device.start(&mut driver).unwrap();
        assert!(!device.clear_up(&mut driver, |_| false), "it serves");
        device.stop(&mut driver, 0).unwrap();
        let mark = std::mem::take(&mut driver.info.as_mut().unwrap().mark);
        assert!(!device.clear_up(&mut driver, |_| false), "not ours");
        driver.info.as_mut().unwrap().mark = mark;
        assert!(device.clear_up(&mut driver, |_| false));
        assert!(driver.info.is_none());
    }
}
