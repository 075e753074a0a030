//! The sealed allocator, in a process of its own: a seal cannot be lifted again.

use weir_core::seal::{self, Policy, SealedAllocator};

#[global_allocator]
static ALLOCATOR: SealedAllocator = SealedAllocator;

#[test]
fn allocations_on_an_io_thread_are_counted_once_sealed_and_others_are_free() {
    seal::on_io_thread(|| drop(vec![1u8; 100]));
    assert_eq!(seal::violations(), 0, "not sealed yet");
    seal::seal(Policy::Count);
    drop(vec![1u8; 100]);
    assert_eq!(seal::violations(), 0, "not an I/O thread");
    seal::on_io_thread(|| drop(vec![1u8; 100]));
    assert_eq!(seal::violations(), 2, "one allocation and one release");

    // Under `Policy::Abort` an allocation ends the process. A child shows that, which is this test
    // again.
    if std::env::var_os("SEALED_TEST_CHILD").is_some() {
        seal::seal(seal::policy_from_environment());
        seal::on_io_thread(|| drop(vec![1u8; 100]));
        unreachable!("the allocator should have aborted");
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .env("WEIR_SEAL", "abort")
        .env("SEALED_TEST_CHILD", "1")
        .arg("--nocapture")
        .output()
        .unwrap();
    assert!(!child.status.success());
    assert!(String::from_utf8_lossy(&child.stderr).contains("after the process was sealed"));
}
