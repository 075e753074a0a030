//! Functions that this object replaces, as the program would have them without it.

/// The function of this name and type that comes after this object's own: libc's, or that of
/// another preloaded object. It is looked up once. `None` if there is none.
macro_rules! next {
    ($name:ident: $type:ty) => {{
        use std::sync::atomic::{AtomicPtr, Ordering};
        static NEXT: AtomicPtr<libc::c_void> = AtomicPtr::new(std::ptr::null_mut());
        let mut next = NEXT.load(Ordering::Relaxed);
        if next.is_null() {
            let name = concat!(stringify!($name), "\0");
            // SAFETY: the name ends with a zero. dlsym takes no memory if the symbol is found.
            next = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr().cast()) };
            NEXT.store(next, Ordering::Relaxed);
        }
        // SAFETY: the function of this name has this type, and null is `None`.
        unsafe { std::mem::transmute::<*mut libc::c_void, Option<$type>>(next) }
    }};
}
