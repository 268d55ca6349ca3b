//! Names what makes the bits of this device: the machine as the products see it, and the code.
//!
//! Never promises more than these values settle: thread count and memory are not among them, since they change no bit.

use sha2::{Digest, Sha256};

/// Version of the gemm crate; a test holds it against the lock file.
const GEMM: &str = "0.19.0";

/// Every source of the device. A test holds the list against the folder.
const SOURCES: [(&str, &str); 14] = [
    ("adamw.rs", include_str!("adamw.rs")),
    ("attention.rs", include_str!("attention.rs")),
    ("buffer.rs", include_str!("buffer.rs")),
    ("check.rs", include_str!("check.rs")),
    ("class.rs", include_str!("class.rs")),
    ("head.rs", include_str!("head.rs")),
    ("linear.rs", include_str!("linear.rs")),
    ("lora.rs", include_str!("lora.rs")),
    ("math.rs", include_str!("math.rs")),
    ("matrix.rs", include_str!("matrix.rs")),
    ("mod.rs", include_str!("mod.rs")),
    ("rows.rs", include_str!("rows.rs")),
    ("weight.rs", include_str!("weight.rs")),
    ("workers.rs", include_str!("workers.rs")),
];

/// Names and values of the device class.
pub(super) fn class() -> Vec<(String, String)> {
    let caches = gemm_common::cache::CACHE_INFO.map(|c| format!("{}/{}/{}", c.cache_bytes, c.associativity, c.cache_line_bytes));
    let values = [
        ("backend", "cpu".to_owned()),
        ("precision", "f32".to_owned()),
        ("cpu", cpu_name()),
        ("instructions", instructions().to_owned()),
        // The gemm crate blocks its reductions by these: bytes, ways and line of L1, L2, L3.
        ("caches", caches.join(" ")),
        ("gemm", GEMM.to_owned()),
        ("kernels", digest()),
    ];
    values.map(|(name, value)| (name.to_owned(), value)).into()
}

/// SHA-256 over names and texts of the sources, and of the random numbers that dropout draws.
fn digest() -> String {
    let mut hash = Sha256::new();
    for (name, text) in SOURCES.into_iter().chain([("../random.rs", include_str!("../random.rs"))]) {
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name);
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The instruction set for which the gemm crate has a kernel here.
#[cfg(target_arch = "x86_64")]
fn instructions() -> &'static str {
    if is_x86_feature_detected!("avx512f") {
        "avx512f"
    } else if is_x86_feature_detected!("fma") {
        "fma"
    } else {
        "scalar"
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn instructions() -> &'static str {
    std::env::consts::ARCH
}

/// The brand string.
#[cfg(target_arch = "x86_64")]
fn cpu_name() -> String {
    use std::arch::x86_64::__cpuid;
    const BRAND: [u32; 3] = [0x8000_0002, 0x8000_0003, 0x8000_0004];
    if __cpuid(0x8000_0000).eax < BRAND[2] {
        return "x86_64".to_owned();
    }
    let bytes: Vec<u8> = BRAND
        .iter()
        .flat_map(|leaf| {
            let r = __cpuid(*leaf);
            [r.eax, r.ebx, r.ecx, r.edx]
        })
        .flat_map(u32::to_le_bytes)
        .take_while(|byte| *byte != 0)
        .collect();
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

#[cfg(not(target_arch = "x86_64"))]
fn cpu_name() -> String {
    std::env::consts::ARCH.to_owned()
}

#[cfg(test)]
mod tests {
    use super::{GEMM, SOURCES, class};

    #[test]
    fn lists_every_source() {
        #[expect(clippy::disallowed_methods, reason = "the test compares the list with the folder")]
        let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src/cpu")).unwrap();
        let mut files: Vec<_> = folder.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        files.sort();
        assert_eq!(files, SOURCES.map(|(name, _)| name));
    }

    #[test]
    fn names_the_version_of_gemm_that_is_used() {
        let lock = include_str!("../../../Cargo.lock");
        assert!(lock.contains(&format!("name = \"gemm\"\nversion = \"{GEMM}\"\n")));
    }

    #[test]
    fn every_value_says_something() {
        assert!(class().iter().all(|(name, value)| !name.is_empty() && !value.is_empty()));
    }
}
