//! The controls of the store benchmark. One control calls the card's copy engine once for each
//! request, as nbd-vram does. It has device memory of its own, and a stream for each thread. The
//! other control is the processor's copy through the card's window, as on the path `mapped`,
//! without a lane around it.

use super::BenchError;
use super::content::stamp;
use super::load::Kind;
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, Page};
use weir_store::vram::engine::{BatchCopies, CallError, Context, DeviceMemory, OwnStream, Pinned, Which};
use weir_store::vram::{Bare, Gpu};

/// GPU memory, with the CUDA context in which it was allocated.
pub struct CopyEngine {
    context: Arc<Context>,
    memory: DeviceMemory,
}

/// One thread's stream and pinned buffer.
pub struct Copier<'a> {
    engine: &'a CopyEngine,
    stream: OwnStream,
    buffer: Pinned,
    random: super::content::Random,
}

impl CopyEngine {
    /// Opens the control. `None` on a machine without CUDA.
    pub fn open(bytes: u64) -> Option<Self> {
        let context =
            Context::open(Path::new("libcuda.so.1"), Which::Index(0), BatchCopies { reads: 1, writes: 1 })
                .ok()?;
        let memory = context.allocate(bytes).ok()?;
        Some(CopyEngine { context, memory })
    }

    /// Makes a thread's own stream, with a buffer of `bytes`.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn copier(&self, bytes: usize, seed: u64) -> Result<Copier<'_>, BenchError> {
        let (stream, buffer) = (self.context.stream()?, self.context.pinned(bytes)?);
        Ok(Copier { engine: self, stream, buffer, random: super::content::Random::new(seed) })
    }

    /// Measures copies a second on `threads` threads that copy `bytes` at a time.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn rate(&self, kind: Kind, threads: usize, bytes: usize, time: Duration) -> Result<f64, BenchError> {
        let mut copiers =
            (0..threads).map(|seed| self.copier(bytes, seed as u64)).collect::<Result<Vec<_>, _>>()?;
        let start = Barrier::new(threads);
        let counts = std::thread::scope(|scope| {
            let runs: Vec<_> = copiers
                .iter_mut()
                .map(|copier| {
                    let start = &start;
                    scope.spawn(move || {
                        start.wait();
                        let since = Instant::now();
                        let mut copies = 0u64;
                        while since.elapsed() < time {
                            copier.once(kind)?;
                            copies += 1;
                        }
                        Ok(copies)
                    })
                })
                .collect();
            runs.into_iter()
                .map(|run| run.join().unwrap_or(Err(BenchError::Panic)))
                .collect::<Result<Vec<u64>, BenchError>>()
        })?;
        Ok(counts.iter().sum::<u64>() as f64 / time.as_secs_f64())
    }
}

impl Copier<'_> {
    /// Makes one copy by the card's copy engine, and waits for its end.
    ///
    /// # Errors
    /// Fails with the driver's error.
    pub fn once(&mut self, kind: Kind) -> Result<Duration, BenchError> {
        let (bytes, memory) = (self.buffer.bytes, &self.engine.memory);
        let places = (memory.bytes / bytes as u64) as u32;
        let address = memory.address + u64::from(self.random.below(places)) * bytes as u64;
        let since = Instant::now();
        // SAFETY: the range lies in the control's own memory. The stream is synchronised before
        // that memory or the buffer is freed.
        unsafe {
            match kind {
                Kind::Read => self.stream.copy_to_host(self.buffer.as_ptr(), address, bytes)?,
                Kind::Write => self.stream.copy_to_device(address, self.buffer.as_ptr(), bytes)?,
            }
        }
        self.stream.synchronize()?;
        Ok(since.elapsed())
    }
}

/// The processor's copy of random pages through the card's window, without a lane around it. It
/// goes over as many pages as the store's rows use.
pub struct BareCopy {
    bare: Bare,
    random: super::content::Random,
    page: Box<Page>,
}

impl BareCopy {
    /// Opens the control over `pages` pages of a card. `None` if the processor cannot map the
    /// card's memory.
    pub fn open(gpu: &Arc<Gpu>, pages: u32) -> Option<Self> {
        let page = Box::new(Page([0x5a; PAGE_SIZE]));
        Some(BareCopy { bare: Bare::open(gpu, pages)?, random: super::content::Random::new(5), page })
    }

    /// Copies one random page, and returns the time that it took. The clock is read in the same way
    /// as around an operation of the store.
    pub fn once(&mut self, kind: Kind) -> Duration {
        let at = self.random.below(self.bare.pages());
        if kind == Kind::Write {
            stamp(&mut self.page, at, 1);
        }
        let _ = Instant::now();
        let since = Instant::now();
        match kind {
            Kind::Read => self.bare.load(at, &mut self.page),
            Kind::Write => self.bare.store(at, &self.page),
        }
        since.elapsed()
    }
}

impl From<CallError> for BenchError {
    fn from(error: CallError) -> Self {
        BenchError::Control(error)
    }
}
