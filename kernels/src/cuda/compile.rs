//! Kernel sources to machine code: NVRTC, once for each source, set of options, version and architecture.
//!
//! Never opens a file: the cache is handed over. Never uses a cached cubin whose digest does not fit.
#![expect(unsafe_code, reason = "calls NVRTC")]

use std::ffi::{CString, c_char};
use std::fmt::Write as _;

use cudarc::nvrtc::sys;
use sha2::{Digest, Sha256};

use super::programs::{HEADERS, Program};
use crate::DeviceError;

/// Where compiled kernels, and what the gate found, are kept between runs. Names are file names (hexadecimal digits and an ending); contents may be lost at any time.
pub trait Cache: Send {
    /// What was put under the name, if it is still there.
    fn get(&self, name: &str) -> Option<Vec<u8>>;
    /// Keeps bytes under the name; failing to is no error, since the kernel is then compiled again.
    fn put(&self, name: &str, bytes: &[u8]);
}

/// The target that a card of this compute capability is compiled for. The "a" targets are those with instructions of their own.
pub(crate) fn architecture((major, minor): (i32, i32)) -> String {
    let own = matches!((major, minor), (9, 0) | (10, 0));
    format!("sm_{major}{minor}{}", if own { "a" } else { "" })
}

/// NVRTC for one architecture.
pub(crate) struct Compiler {
    pub(crate) version: (i32, i32),
    pub(crate) architecture: String,
    cache: Option<Box<dyn Cache>>,
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Compiler({:?}, {})", self.version, self.architecture)
    }
}

/// A program that NVRTC refuses is a fault of this crate, or of an NVRTC too old for the architecture.
fn refused(program: &Program, what: &str) -> DeviceError {
    DeviceError::Unsupported(format!("NVRTC does not compile {}: {what}", program.name))
}

/// NVRTC's version. The caller has probed for it.
pub(crate) fn version() -> Result<(i32, i32), DeviceError> {
    let mut version = (0, 0);
    // SAFETY: writes two integers that outlive the call.
    let status = unsafe { sys::nvrtcVersion(&raw mut version.0, &raw mut version.1) };
    status.result().map_err(|e| DeviceError::Failed(format!("NVRTC's version: {e:?}")))?;
    Ok(version)
}

impl Compiler {
    /// The caller has probed for NVRTC: without it, this panics in cudarc.
    pub(crate) fn new(architecture: String, cache: Option<Box<dyn Cache>>) -> Result<Self, DeviceError> {
        Ok(Self { version: version()?, architecture, cache })
    }

    /// The options that every program is compiled with. Contraction to fused multiply-add is fixed: it makes bits.
    fn options(&self, defines: &[String]) -> Vec<String> {
        let mut options = vec![format!("--gpu-architecture={}", self.architecture), "--std=c++17".to_owned(), "--fmad=true".to_owned()];
        options.extend(defines.iter().map(|define| format!("-D{define}")));
        if cfg!(feature = "broken-kernel") {
            options.push("-DNODUS_BROKEN_KERNEL".to_owned());
        }
        if cfg!(feature = "broken-gate-up") {
            options.push("-DNODUS_BROKEN_GATE_UP".to_owned());
        }
        options
    }

    /// The cubins of some programs under some defines, from the cache or compiled, as many at a time as there are processors.
    pub(crate) fn cubins(&self, programs: &[&Program], defines: &[String]) -> Result<Vec<Vec<u8>>, DeviceError> {
        let options = self.options(defines);
        let names: Vec<String> = programs.iter().map(|program| format!("{}.cubin", self.key(program, &options))).collect();
        let mut cubins: Vec<Option<Vec<u8>>> = names.iter().map(|name| self.recall(name)).collect();
        let mut missing: Vec<_> = programs.iter().zip(&names).zip(&mut cubins).filter(|(_, cubin)| cubin.is_none()).collect();
        for some in missing.chunks_mut(std::thread::available_parallelism().map_or(1, usize::from)) {
            let compiled: Vec<_> = std::thread::scope(|scope| {
                let options = options.as_slice();
                let threads: Vec<_> = some.iter().map(|((program, _), _)| scope.spawn(move || compile(program, options))).collect();
                threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
            });
            for (((_, name), cubin), compiled) in some.iter_mut().zip(compiled) {
                let compiled = compiled.map_err(|_| DeviceError::Failed("a thread that compiles kernels panicked".into()))??;
                self.keep(name, &compiled);
                **cubin = Some(compiled);
            }
        }
        Ok(cubins.into_iter().flatten().collect())
    }

    /// What the cache has under a name, undamaged.
    pub(crate) fn recall(&self, name: &str) -> Option<Vec<u8>> {
        self.cache.as_ref().and_then(|cache| cache.get(name)).and_then(|bytes| checked(&bytes))
    }

    /// Keeps bytes with their digest before them.
    pub(crate) fn keep(&self, name: &str, content: &[u8]) {
        if let Some(cache) = &self.cache {
            let mut bytes = Sha256::digest(content).to_vec();
            bytes.extend_from_slice(content);
            cache.put(name, &bytes);
        }
    }

    fn key(&self, program: &Program, options: &[String]) -> String {
        let mut hash = Sha256::new();
        for part in [program.name, program.source].into_iter().chain(HEADERS.iter().flat_map(|(name, source)| [*name, *source])) {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        for option in options {
            hash.update((option.len() as u64).to_le_bytes());
            hash.update(option);
        }
        hash.update(self.version.0.to_le_bytes());
        hash.update(self.version.1.to_le_bytes());
        hex(&hash.finalize())
    }
}

/// Digits of bytes.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn checked(bytes: &[u8]) -> Option<Vec<u8>> {
    let (digest, cubin) = bytes.split_at_checked(32)?;
    (Sha256::digest(cubin).as_slice() == digest).then(|| cubin.to_vec())
}

/// A program inside NVRTC.
struct Source(sys::nvrtcProgram);

impl Drop for Source {
    fn drop(&mut self) {
        // SAFETY: created once, in `compile`.
        let _ = unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

fn c_text(program: &Program, text: &str) -> Result<CString, DeviceError> {
    CString::new(text).map_err(|_| refused(program, "a zero byte in its source or options"))
}

fn compile(program: &Program, options: &[String]) -> Result<Vec<u8>, DeviceError> {
    let text = |text: &str| c_text(program, text);
    let (source, name) = (text(program.source)?, text(program.name)?);
    let names: Vec<CString> = HEADERS.iter().map(|(name, _)| text(name)).collect::<Result<_, _>>()?;
    let headers: Vec<CString> = HEADERS.iter().map(|(_, source)| text(source)).collect::<Result<_, _>>()?;
    let options: Vec<CString> = options.iter().map(|option| text(option)).collect::<Result<_, _>>()?;
    let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<*const c_char>>();
    let (name_pointers, header_pointers, option_pointers) = (pointers(&names), pointers(&headers), pointers(&options));

    let mut handle = std::ptr::null_mut();
    // SAFETY: every text is a C string that outlives `made`; both lists have as many entries as said.
    let status = unsafe {
        sys::nvrtcCreateProgram(
            &raw mut handle,
            source.as_ptr(),
            name.as_ptr(),
            HEADERS.len() as i32,
            header_pointers.as_ptr(),
            name_pointers.as_ptr(),
        )
    };
    status.result().map_err(|e| refused(program, &format!("{e:?}")))?;
    let made = Source(handle);
    // SAFETY: the program was just made; the options outlive the call.
    let status = unsafe { sys::nvrtcCompileProgram(made.0, options.len() as i32, option_pointers.as_ptr()) };
    status.result().map_err(|e| refused(program, &format!("{e:?}\n{}", log(&made))))?;

    let mut bytes = 0;
    // SAFETY: the program is compiled; writes one integer that outlives the call.
    unsafe { sys::nvrtcGetCUBINSize(made.0, &raw mut bytes) }.result().map_err(|e| refused(program, &format!("{e:?}")))?;
    let mut cubin = vec![0_u8; bytes];
    // SAFETY: as large as NVRTC said.
    unsafe { sys::nvrtcGetCUBIN(made.0, cubin.as_mut_ptr().cast()) }.result().map_err(|e| refused(program, &format!("{e:?}")))?;
    if cubin.is_empty() {
        return Err(refused(program, "no machine code came out"));
    }
    Ok(cubin)
}

/// What the compiler said; empty where even that fails.
fn log(source: &Source) -> String {
    let mut bytes = 0;
    // SAFETY: the program lives; writes one integer that outlives the call.
    if unsafe { sys::nvrtcGetProgramLogSize(source.0, &raw mut bytes) }.result().is_err() {
        return String::new();
    }
    let mut text = vec![0_u8; bytes];
    // SAFETY: as large as NVRTC said.
    if unsafe { sys::nvrtcGetProgramLog(source.0, text.as_mut_ptr().cast()) }.result().is_err() {
        return String::new();
    }
    String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned()
}

#[cfg(test)]
mod tests {
    use super::{Digest, Sha256, architecture, checked};

    #[test]
    fn targets() {
        let of = |capability| architecture(capability);
        assert_eq!([of((8, 0)), of((8, 9)), of((9, 0)), of((10, 0)), of((12, 0))], ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120"]);
    }

    #[test]
    fn a_damaged_cache_entry_is_not_used() {
        let mut entry = Sha256::digest(b"cubin").to_vec();
        entry.extend_from_slice(b"cubin");
        assert_eq!(checked(&entry).unwrap(), b"cubin");
        entry[35] ^= 1;
        assert!(checked(&entry).is_none());
        assert!(checked(&entry[..20]).is_none());
    }
}
