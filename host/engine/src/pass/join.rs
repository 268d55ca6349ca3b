//! What happens between two half layers: rows that were at hand come in, and rows computed up to a cut are put by.
//!
//! Never asks whether rows are worth keeping: that was decided before the pass.

use nodus_kernels::{Device, DeviceError, Use};

use super::{Buffer, Pass};
use crate::cache::{Rows, Slot};
use crate::rows::Level;

impl<D: Device> Pass<'_, '_, D> {
    /// The residual stream as this half layer reads it, before any fan-out.
    pub(super) fn join(&mut self, half: usize, residual: Buffer<D>) -> Result<Buffer<D>, DeviceError> {
        let residual = match self.map.entry(half) {
            None => residual,
            Some(entry) => self.come_in(half, entry, &residual)?,
        };
        self.put_by(half, &residual)?;
        if half == self.map.trunk_end() && self.trunk_end_ns.is_none() {
            self.trunk_end_ns = Some((self.clock)());
            if half > 0 {
                self.device.mark()?;
            }
        }
        Ok(residual)
    }

    /// The rows of the level below and, beside them, those that were at hand.
    fn come_in(&mut self, half: usize, (below, level): (&Level, &Level), residual: &D::Buffer) -> Result<Buffer<D>, DeviceError> {
        let (map, hidden) = (self.map, self.trunk.config.hidden_size);
        let view = level.view(half + 1 == map.halves());
        let mut joined = self.pool.take(self.device, Use::Activation, view.rows.rows() * hidden)?;
        if let Some(rows) = level.going_on(view, below) {
            self.device.gather(&rows, view.origin(), hidden, residual, &mut joined)?;
        }
        for at_cut in map.at_cuts(half, true) {
            let key = self.members.get(at_cut.member).and_then(|member| member.key(&at_cut));
            let (offset, len) = (at_cut.segment.start * hidden, at_cut.segment.rows * hidden);
            match key.and_then(|key| self.cuts.cache.rows(key)) {
                Some(Rows::Device(rows)) => self.device.copy(rows, 0, &mut joined, offset, len)?,
                Some(Rows::Host(rows)) => self.device.upload(rows, &mut joined, offset)?,
                None => return Err(DeviceError::Failed("rows that were at hand are gone".into())),
            }
        }
        Ok(joined)
    }

    /// Copies rows to where they are kept.
    fn put_by(&mut self, half: usize, residual: &D::Buffer) -> Result<(), DeviceError> {
        if !self.cuts.slots.iter().any(|slot| slot.key.half == half) {
            return Ok(());
        }
        let hidden = self.trunk.config.hidden_size;
        for at_cut in self.map.at_cuts(half, false) {
            let key = self.members.get(at_cut.member).and_then(|member| member.key(&at_cut));
            let Some(Slot { buffer, .. }) = self.cuts.slots.iter_mut().find(|slot| Some(&slot.key) == key) else { continue };
            self.device.copy(residual, at_cut.segment.start * hidden, buffer, 0, at_cut.segment.rows * hidden)?;
        }
        Ok(())
    }
}
