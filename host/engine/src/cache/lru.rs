//! Values by key with their sizes, the least recently used at hand.
//!
//! Never holds more bytes than its bound, and knows nothing of what it holds.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Values by key, bounded in bytes.
#[derive(Debug)]
pub(super) struct Lru<K, V> {
    items: BTreeMap<Arc<K>, Item<V>>,
    /// By last use.
    order: BTreeMap<u64, Arc<K>>,
    uses: u64,
    bytes: u64,
    bytes_max: u64,
}

#[derive(Debug)]
struct Item<V> {
    value: V,
    bytes: u64,
    used: u64,
}

impl<K: Ord, V> Lru<K, V> {
    pub(super) fn new(bytes_max: u64) -> Self {
        Self { items: BTreeMap::new(), order: BTreeMap::new(), uses: 0, bytes: 0, bytes_max }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// Counts uses; what is used from now on is used later than this.
    pub(super) fn now(&self) -> u64 {
        self.uses
    }

    /// A value, without using it.
    pub(super) fn peek(&self, key: &K) -> Option<&V> {
        self.items.get(key).map(|item| &item.value)
    }

    /// Uses a value; whether there is one.
    pub(super) fn touch(&mut self, key: &K) -> bool {
        let Some(item) = self.items.get_mut(key) else { return false };
        self.uses += 1;
        if let Some(key) = self.order.remove(&item.used) {
            self.order.insert(self.uses, key);
        }
        item.used = self.uses;
        true
    }

    /// Puts a value in, used just now. Gives it back where it does not fit or one is there.
    pub(super) fn insert(&mut self, key: Arc<K>, value: V, bytes: u64) -> Result<(), V> {
        if self.items.contains_key(&key) || self.bytes.saturating_add(bytes) > self.bytes_max {
            return Err(value);
        }
        self.uses += 1;
        self.bytes += bytes;
        self.order.insert(self.uses, key.clone());
        self.items.insert(key, Item { value, bytes, used: self.uses });
        Ok(())
    }

    /// Takes the least recently used value out, if its last use was not after `since`.
    pub(super) fn pop(&mut self, since: u64) -> Option<(Arc<K>, V)> {
        let oldest = self.order.first_entry().filter(|oldest| *oldest.key() <= since)?;
        let key = oldest.remove();
        let item = self.items.remove(&key)?;
        self.bytes -= item.bytes;
        Some((key, item.value))
    }

    /// Drops every value whose key is not wanted.
    pub(super) fn retain(&mut self, wanted: impl Fn(&K) -> bool) {
        self.order.retain(|_, key| wanted(key));
        let mut freed = 0;
        self.items.retain(|key, item| {
            let stays = wanted(key);
            freed += if stays { 0 } else { item.bytes };
            stays
        });
        self.bytes -= freed;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::Lru;

    #[test]
    fn the_least_recently_used_goes_first_and_bytes_are_bounded() {
        let mut lru = Lru::new(30);
        for key in 0..3 {
            lru.insert(Arc::new(key), key * 10, 10).unwrap();
        }
        assert_eq!(lru.insert(Arc::new(3), 30, 1), Err(30), "more than its bound");
        assert_eq!(lru.insert(Arc::new(2), 99, 0), Err(99), "a key twice");
        let since = lru.now();
        assert!(lru.touch(&0) && !lru.touch(&7));
        assert_eq!(lru.pop(since), Some((Arc::new(1), 10)));
        assert_eq!((lru.bytes(), lru.peek(&0), lru.peek(&1)), (20, Some(&0), None));
        assert_eq!(lru.pop(since), Some((Arc::new(2), 20)));
        assert_eq!(lru.pop(since), None, "0 was used after that");
        lru.retain(|key| *key != 0);
        assert_eq!((lru.bytes(), lru.pop(u64::MAX)), (0, None));
    }
}
