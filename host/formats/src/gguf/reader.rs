//! The container: metadata and tensors of a mapped file.
//!
//! Allocates in proportion to what the file really holds; knows no key and no tensor by name.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use super::dequantise::Kind;
use crate::error::{FormatError, Place, clip};

/// Most list items in all metadata: several vocabularies' worth.
const ITEMS_MAX: u64 = 8_000_000;
const DIMENSIONS_MAX: u32 = 4;
const LIST_DEPTH_MAX: u32 = 2;

/// A metadata value. Whole numbers that are not negative are `Uint`, whatever their width in the file.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value<'a> {
    Uint(u64),
    Int(i64),
    Float(f64),
    Bool(bool),
    Text(&'a str),
    List(Vec<Self>),
}

/// A tensor as stored.
pub(super) struct Tensor<'a> {
    pub(super) kind: Kind,
    /// Row-major, the longest stride first; the file has it the other way round.
    pub(super) shape: Vec<usize>,
    pub(super) data: &'a [u8],
}

impl Tensor<'_> {
    /// Length of a row: what lies contiguous.
    pub(super) fn row(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

/// A whole file.
pub(super) struct Gguf<'a> {
    pub(super) file: &'a str,
    pub(super) metadata: BTreeMap<&'a str, Value<'a>>,
    pub(super) tensors: BTreeMap<&'a str, Tensor<'a>>,
}

impl<'a> Gguf<'a> {
    pub(super) fn parse(file: &'a str, bytes: &'a [u8]) -> Result<Self, FormatError> {
        let mut r = Reader { file, bytes, at: 0, items: 0 };
        let invalid = |found: String, expected: &str| FormatError::invalid(file, Place::File, found, expected);
        if r.array::<4>("the magic number")? != *b"GGUF" {
            return Err(invalid("no GGUF magic number".into(), "a GGUF file"));
        }
        let version = r.u32("the version")?;
        if !(2..=3).contains(&version) {
            return Err(FormatError::unsupported(file, Place::File, format!("GGUF version {version}"), "2 or 3, little-endian"));
        }
        let (tensors, pairs) = (r.u64("the number of tensors")?, r.u64("the number of metadata pairs")?);
        let metadata = r.metadata(pairs)?;
        let infos = r.infos(tensors)?;
        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(Value::Uint(n)) if n.is_power_of_two() && *n <= 1 << 16 => *n,
            Some(other) => {
                return Err(FormatError::invalid(file, Place::key("general.alignment"), format!("{other:?}"), "a power of two"));
            }
        };
        let start = (r.at as u64).next_multiple_of(alignment);
        Ok(Self { file, metadata, tensors: place(file, bytes, start, infos)? })
    }

    pub(super) fn wrong(&self, key: &str, expected: &str) -> FormatError {
        let found = self.metadata.get(key).map_or("absent".into(), |v| clip(&format!("{v:?}")));
        FormatError::invalid(self.file, Place::key(key), found, expected)
    }

    pub(super) fn unsupported(&self, key: &str, what: &str, expected: &str) -> FormatError {
        FormatError::unsupported(self.file, Place::key(key), clip(what), expected)
    }

    pub(super) fn uint(&self, key: &str) -> Result<Option<u64>, FormatError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Uint(n)) => Ok(Some(*n)),
            Some(_) => Err(self.wrong(key, "a whole number")),
        }
    }

    pub(super) fn float(&self, key: &str) -> Result<Option<f64>, FormatError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Float(x)) if x.is_finite() => Ok(Some(*x)),
            Some(_) => Err(self.wrong(key, "a finite number")),
        }
    }

    pub(super) fn bool(&self, key: &str) -> Result<Option<bool>, FormatError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, FormatError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(key, "a string")),
        }
    }

    pub(super) fn list(&self, key: &str) -> Result<Option<&[Value<'a>]>, FormatError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::List(list)) => Ok(Some(list)),
            Some(_) => Err(self.wrong(key, "a list")),
        }
    }
}

/// What the file says of a tensor, before it is held against the file's size.
struct Info<'a> {
    name: &'a str,
    kind: Kind,
    shape: Vec<usize>,
    offset: u64,
}

/// Finds each tensor's bytes. Two tensors may not share any: a small file could otherwise stand for a huge model.
fn place<'a>(file: &str, bytes: &'a [u8], start: u64, mut infos: Vec<Info<'a>>) -> Result<BTreeMap<&'a str, Tensor<'a>>, FormatError> {
    infos.sort_by_key(|info| info.offset);
    let mut tensors = BTreeMap::new();
    let mut free = start;
    for Info { name, kind, shape, offset } in infos {
        let invalid = |found: String, expected: &str| FormatError::invalid(file, Place::tensor(name), found, expected);
        let elements = shape.iter().try_fold(1_u64, |n, d| n.checked_mul(*d as u64));
        let (block, size) = kind.block();
        let row = shape.last().copied().unwrap_or(1);
        if !row.is_multiple_of(block) {
            return Err(invalid(format!("rows of {row}"), &format!("a multiple of {block}, {kind:?}'s block")));
        }
        let length = elements.and_then(|n| (n / block as u64).checked_mul(size as u64));
        let begin = start.checked_add(offset).filter(|b| *b >= free);
        let begin = begin.ok_or_else(|| invalid(format!("offset {offset}, inside the tensor before it"), "tensors one after another"))?;
        let end = length.and_then(|n| begin.checked_add(n)).filter(|end| *end <= bytes.len() as u64);
        let too_short =
            || invalid(format!("a file of {} bytes, which ends before the tensor does", bytes.len()), "a whole file; it was cut off");
        let end = end.ok_or_else(too_short)?;
        let range = usize::try_from(begin).ok().zip(usize::try_from(end).ok());
        let data = range.and_then(|(b, e)| bytes.get(b..e)).ok_or_else(too_short)?;
        free = end;
        match tensors.entry(name) {
            Entry::Vacant(slot) => slot.insert(Tensor { kind, shape, data }),
            Entry::Occupied(_) => return Err(invalid("a second one of this name".into(), "each name once")),
        };
    }
    Ok(tensors)
}

struct Reader<'a> {
    file: &'a str,
    bytes: &'a [u8],
    at: usize,
    items: u64,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: u64, what: &str) -> Result<&'a [u8], FormatError> {
        let end = usize::try_from(n).ok().and_then(|n| self.at.checked_add(n));
        let found = end.and_then(|end| self.bytes.get(self.at..end));
        let found = found.ok_or_else(|| {
            let have = format!("{} bytes left at byte {}", self.bytes.len().saturating_sub(self.at), self.at);
            FormatError::invalid(self.file, Place::File, have, format!("{n} for {what}; the file was cut off, or is none"))
        })?;
        self.at += found.len();
        Ok(found)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], FormatError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    fn u32(&mut self, what: &str) -> Result<u32, FormatError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, FormatError> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn text(&mut self, what: &str) -> Result<&'a str, FormatError> {
        let length = self.u64(what)?;
        std::str::from_utf8(self.take(length, what)?)
            .map_err(|_| FormatError::invalid(self.file, Place::File, format!("{what} that is not UTF-8"), "UTF-8"))
    }

    fn metadata(&mut self, pairs: u64) -> Result<BTreeMap<&'a str, Value<'a>>, FormatError> {
        let mut metadata = BTreeMap::new();
        // Nothing is reserved for the stated number: each pair that is read has paid for itself in bytes.
        for _ in 0..pairs {
            let key = self.text("a key")?;
            let kind = self.u32(key)?;
            let value = self.value(kind, key, 0)?;
            if metadata.insert(key, value).is_some() {
                return Err(FormatError::invalid(self.file, Place::key(key), "a second value", "each key once"));
            }
        }
        Ok(metadata)
    }

    fn value(&mut self, kind: u32, key: &str, depth: u32) -> Result<Value<'a>, FormatError> {
        let signed = |n: i64| u64::try_from(n).map_or(Value::Int(n), Value::Uint);
        Ok(match kind {
            0 => Value::Uint(self.array::<1>(key)?[0].into()),
            1 => signed(i8::from_le_bytes(self.array(key)?).into()),
            2 => Value::Uint(u16::from_le_bytes(self.array(key)?).into()),
            3 => signed(i16::from_le_bytes(self.array(key)?).into()),
            4 => Value::Uint(self.u32(key)?.into()),
            5 => signed(i32::from_le_bytes(self.array(key)?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array(key)?).into()),
            7 => Value::Bool(self.array::<1>(key)?[0] != 0),
            8 => Value::Text(self.text(key)?),
            9 if depth < LIST_DEPTH_MAX => {
                let (kind, n) = (self.u32(key)?, self.u64(key)?);
                self.items = self.items.saturating_add(n);
                if self.items > ITEMS_MAX {
                    let expected = format!("at most {ITEMS_MAX} in the whole file");
                    return Err(FormatError::invalid(self.file, Place::key(key), format!("a list of {n} items"), expected));
                }
                Value::List((0..n).map(|_| self.value(kind, key, depth + 1)).collect::<Result<_, _>>()?)
            }
            10 => Value::Uint(self.u64(key)?),
            11 => signed(i64::from_le_bytes(self.array(key)?)),
            12 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            other => {
                return Err(FormatError::invalid(self.file, Place::key(key), format!("a value of type {other}"), "a type from 0 to 12"));
            }
        })
    }

    fn infos(&mut self, tensors: u64) -> Result<Vec<Info<'a>>, FormatError> {
        let mut infos = Vec::new();
        for _ in 0..tensors {
            let name = self.text("a tensor's name")?;
            let dimensions = self.u32(name)?;
            if dimensions > DIMENSIONS_MAX {
                let found = format!("{dimensions} dimensions");
                return Err(FormatError::invalid(self.file, Place::tensor(name), found, format!("at most {DIMENSIONS_MAX}")));
            }
            let mut shape = (0..dimensions).map(|_| self.u64(name)).collect::<Result<Vec<_>, _>>()?;
            shape.reverse();
            let shape = shape.into_iter().map(usize::try_from).collect::<Result<Vec<_>, _>>();
            let shape = shape.map_err(|e| FormatError::invalid(self.file, Place::tensor(name), e, "a size that fits in memory"))?;
            let kind = self.u32(name)?;
            let kind = Kind::of(kind).map_err(|what| {
                let expected = "one of F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K";
                FormatError::unsupported(self.file, Place::tensor(name), format!("type {what}"), expected)
            })?;
            infos.push(Info { name, kind, shape, offset: self.u64(name)? });
        }
        Ok(infos)
    }
}
