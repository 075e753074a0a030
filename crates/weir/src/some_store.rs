//! The store of `weir try` and `weir mount`: the one asked for, else the first GPU's memory, else
//! host memory.

use crate::on::StoreChoice;
use weir_cli::failure::Failure;
use weir_core::ByteSize;
use weir_core::log::{Level, Log};
use weir_store::vram::Target;
use weir_store::{StoreUrl, VramUrl};

/// Opens the store by `open`. A store without a size in its text gets `size`, or `default` if that
/// option is missing.
pub fn open<T>(
    asked: Option<&StoreChoice>,
    size: Option<ByteSize>,
    default: ByteSize,
    log: &Log,
    mut open: impl FnMut(&StoreUrl) -> Result<T, Failure>,
) -> Result<(StoreUrl, T), Failure> {
    let mut open = |url: StoreUrl| open(&url).map(|it| (url, it));
    if let Some(asked) = asked {
        return open(sized(asked, size, default));
    }
    let size = size.unwrap_or(default);
    match open(StoreUrl::Vram(VramUrl { size: Some(size), ..VramUrl::new(Target::Index(0)) })) {
        // Do not print the reason: it takes several lines, and most machines have no GPU.
        Err(Failure::Failed(_) | Failure::NoRoom(_)) => {
            log(
                Level::Warning,
                format_args!(
                    "using host memory, since {size} of GPU memory are not to be had; --store vram:0 says why, weir doctor what is missing"
                ),
            );
            open(StoreUrl::Host { size })
        }
        other => other,
    }
}

fn sized(asked: &StoreChoice, size: Option<ByteSize>, default: ByteSize) -> StoreUrl {
    match asked.clone() {
        StoreChoice::Host => StoreUrl::Host { size: size.unwrap_or(default) },
        StoreChoice::Vram(url) => StoreUrl::Vram(VramUrl { size: url.size.or(size), ..url }),
        StoreChoice::Url(mut url) => {
            match &mut url {
                StoreUrl::File(file) => file.size = file.size.or(size),
                StoreUrl::Stripe(stripe) => stripe.size = stripe.size.or(size),
                StoreUrl::Host { .. } | StoreUrl::Vram(_) | StoreUrl::Remote(_) | StoreUrl::Sim(_) => {}
            }
            url
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_has_the_size_that_it_says_else_the_one_asked_for() {
        let log: Log = std::sync::Arc::new(|_, _| {});
        let (two, default) = (ByteSize(2 << 20), ByteSize(1 << 20));
        for (asked, size, opened) in [
            ("host", None, "host:1MiB"),
            ("host", Some(two), "host:2MiB"),
            ("host:8MiB", Some(two), "host:8MiB"),
            ("vram:1", Some(two), "vram:1?size=2MiB"),
            ("vram:1?size=8MiB", Some(two), "vram:1?size=8MiB"),
            ("vram", None, "vram:"),
            ("file:/f", Some(two), "file:/f?size=2MiB"),
            ("stripe:/f,/g", Some(two), "stripe:/f,/g?size=2MiB"),
        ] {
            let asked: StoreChoice = asked.parse().expect("a store");
            let (url, seen) =
                open(Some(&asked), size, default, &log, |url| Ok(url.to_string())).expect("opened");
            assert_eq!((url.to_string().as_str(), seen.as_str()), (opened, opened));
        }
    }

    #[test]
    fn without_gpu_memory_it_is_host_memory_and_a_wrong_figure_is_not_tried_twice() {
        let log: Log = std::sync::Arc::new(|_, _| {});
        let size = Some(ByteSize(2 << 20));
        let mut tried = Vec::new();
        let mut without_gpu = |url: &StoreUrl| {
            tried.push(url.to_string());
            if tried.len() == 1 { Err(Failure::failed("no card")) } else { Ok(()) }
        };
        open(None, size, ByteSize(1), &log, &mut without_gpu).expect("host memory");
        assert_eq!(tried, ["vram:0?size=2MiB", "host:2MiB"]);
        let wrong = |_: &StoreUrl| -> Result<(), Failure> { Err(Failure::Usage("wrong".into())) };
        assert!(matches!(open(None, size, ByteSize(1), &log, wrong), Err(Failure::Usage(_))));
    }
}
