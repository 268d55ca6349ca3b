//! Machine code of components, sealed: only what this host compiled is ever loaded.
//!
//! Holds the crate's one `unsafe`, and has one constructor: [`Precompiled::open`], which wants the seal of the host's own key.

use hmac::{Hmac, KeyInit as _, Mac as _};
use nodus_protocol::Digest;
use sha2::Sha256;
use wasmtime::Engine;
use wasmtime::component::Component;

/// What seals are made with. Whoever has it can have any code run, so it never leaves this host's processes.
#[derive(Clone)]
pub struct SealKey([u8; Self::BYTES]);

/// A component's machine code, as wasmtime wrote it down in a process of this host.
#[derive(Clone, Debug)]
pub struct Precompiled {
    digest: Digest,
    code: Vec<u8>,
}

/// Length of a seal, which stands in front of the code.
const SEAL_BYTES: usize = 32;

impl SealKey {
    /// Length of a key.
    pub const BYTES: usize = 32;

    /// A key of bytes that nobody can guess.
    #[must_use]
    pub fn new(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// The code with its seal in front. Only for what [`crate::Sandbox::compile`] answered in a process that ran nothing else.
    #[must_use]
    pub fn seal(&self, component: Digest, settings: Digest, code: &[u8]) -> Vec<u8> {
        let seal = self.mac(component, settings, code).finalize().into_bytes();
        [seal.as_slice(), code].concat()
    }

    fn mac(&self, component: Digest, settings: Digest, code: &[u8]) -> Hmac<Sha256> {
        // Of a block's length, so that making one cannot fail; zeroes at the end do not change an HMAC.
        let mut key = [0; 64];
        for (to, from) in key.iter_mut().zip(self.0) {
            *to = from;
        }
        let mut mac = Hmac::<Sha256>::new(&key.into());
        for part in [b"nodus precompiled component 1".as_slice(), component.as_bytes(), settings.as_bytes(), code] {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

impl std::fmt::Debug for SealKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SealKey(..)")
    }
}

impl Precompiled {
    /// Code that was sealed with this key, for this component, under these settings; none for anything else.
    #[must_use]
    pub fn open(key: &SealKey, component: Digest, settings: Digest, sealed: &[u8]) -> Option<Self> {
        let (seal, code) = sealed.split_at_checked(SEAL_BYTES)?;
        key.mac(component, settings, code).verify_slice(seal).ok()?;
        Some(Self { digest: component, code: code.to_vec() })
    }

    /// The same with another key's seal, for another process of this host.
    #[must_use]
    pub fn reseal(&self, key: &SealKey, settings: Digest) -> Vec<u8> {
        key.seal(self.digest, settings, &self.code)
    }

    /// Digest of the component that it was made of.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    #[expect(unsafe_code, reason = "wasmtime cannot check machine code; the seal says whose it is")]
    pub(crate) fn component(&self, engine: &Engine) -> wasmtime::Result<Component> {
        // SAFETY: `code` is what wasmtime's `serialize` wrote, unmodified. `open`, the only constructor, has verified an HMAC over it whose
        // key only this host's own processes hold, and they seal only what `Sandbox::compile` answered. That the code is of this version
        // and of this engine's settings wasmtime checks itself.
        unsafe { Component::deserialize(engine, &self.code) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::{Sandbox, SandboxOptions};

    #[test]
    fn only_what_was_sealed_with_the_key_is_opened() {
        let (key, other) = (SealKey::new([1; 32]), SealKey::new([2; 32]));
        let (component, settings, foreign) = (Digest::of(b"component"), Digest::of(b"settings"), Digest::of(b"foreign"));
        let sealed = key.seal(component, settings, b"code");
        assert_eq!(Precompiled::open(&key, component, settings, &sealed).unwrap().code, b"code");
        assert!(Precompiled::open(&other, component, settings, &sealed).is_none());
        assert!(Precompiled::open(&key, foreign, settings, &sealed).is_none());
        assert!(Precompiled::open(&key, component, foreign, &sealed).is_none());
        for place in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[place] ^= 1;
            assert!(Precompiled::open(&key, component, settings, &changed).is_none(), "{place}");
            assert!(Precompiled::open(&key, component, settings, &sealed[..place]).is_none(), "{place}");
        }
    }

    #[test]
    fn what_one_sandbox_compiled_another_loads() {
        let sandbox = Sandbox::new(SandboxOptions::default()).unwrap();
        let run = r#"(component
            (core module $m (func (export "run") (result i32) i32.const 0) (memory (export "memory") 1))
            (core instance $i (instantiate $m))
            (type $result (result (error string)))
            (func (export "run") (result $result) (canon lift (core func $i "run") (memory (core memory $i "memory")))))"#;
        let bytes = wat::parse_str(run).unwrap();
        let code = sandbox.compile(&bytes).unwrap().unwrap();
        let (key, digest, settings) = (SealKey::new([1; 32]), Digest::of(&bytes), sandbox.settings());
        let precompiled = Precompiled::open(&key, digest, settings, &key.seal(digest, settings, &code)).unwrap();
        assert_eq!(sandbox.load(&precompiled).unwrap().digest(), digest);
        // Even with the right seal, wasmtime refuses what is not its own.
        let nonsense = Precompiled::open(&key, digest, settings, &key.seal(digest, settings, b"nonsense")).unwrap();
        assert!(sandbox.load(&nonsense).is_err());
    }
}
