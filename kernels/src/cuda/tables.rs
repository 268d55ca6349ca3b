//! What the kernels must know of a layout, in device memory: positions, tiles, segments; kept for layouts seen lately.
//!
//! Never looks at whose rows they are.

use std::ops::Range;
use std::sync::Arc;

use super::ROW_ALIGN;
use super::driver::Address;
use super::memory::{Block, Owner, Pool, Staging};
use crate::{DeviceError, Layout};

/// Layouts whose tables are kept: a few levels of a few passes.
const KEPT: usize = 64;

/// Where a layout's tables are. Valid until [`KEPT`] other layouts have been asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowTables {
    /// A u32 a row; `u32::MAX` for padding.
    pub(crate) positions: Address,
    /// `Tile` of common.cuh, one for 128 rows.
    pub(crate) tiles: Address,
    /// `Segment` of common.cuh.
    pub(crate) segments: Address,
}

/// The tables of layouts, the latest used last.
#[derive(Debug, Default)]
pub(crate) struct TableCache {
    kept: Vec<(Layout, Block, RowTables)>,
}

impl TableCache {
    pub(crate) fn get(&mut self, layout: &Layout, pool: &Arc<Pool>, staging: &mut Staging) -> Result<RowTables, DeviceError> {
        if let Some(found) = self.kept.iter().position(|(kept, ..)| kept.is_clone_of(layout)) {
            let entry = self.kept.remove(found);
            let tables = entry.2;
            self.kept.push(entry);
            return Ok(tables);
        }
        let words = words(layout);
        let offsets = words.each_ref().map(|part| (part.len() * size_of::<u32>()).next_multiple_of(256));
        let block = pool.alloc(offsets.iter().sum(), Owner::Device)?;
        let mut offset = 0;
        let mut addresses = [0; 3];
        for (address, (part, size)) in addresses.iter_mut().zip(words.iter().zip(offsets)) {
            let bytes: &[u8] = bytemuck::cast_slice(part);
            staging.upload(&block, offset, bytes.len(), |at, chunk| chunk.copy_from_slice(&bytes[at..at + chunk.len()]))?;
            *address = block.address() + offset as u64;
            offset += size;
        }
        let [positions, tiles, segments] = addresses;
        let tables = RowTables { positions, tiles, segments };
        if self.kept.len() >= KEPT {
            self.kept.remove(0);
        }
        self.kept.push((layout.clone(), block, tables));
        Ok(tables)
    }
}

fn words(layout: &Layout) -> [Vec<u32>; 3] {
    assert!(
        layout.rows().is_multiple_of(ROW_ALIGN) && layout.rows() <= i32::MAX as usize,
        "{} rows; a multiple of {ROW_ALIGN} was expected",
        layout.rows()
    );
    let mut tiles = vec![[0; 2]; layout.rows() / ROW_ALIGN];
    let mut segments = Vec::with_capacity(layout.segments().len());
    for (index, segment) in layout.segments().iter().enumerate() {
        assert!(
            segment.start.is_multiple_of(ROW_ALIGN),
            "a segment starts at row {}; a multiple of {ROW_ALIGN} was expected",
            segment.start
        );
        segments.push([segment.start as u32, segment.rows as u32, segment.sequence, 0]);
        for before in (0..segment.rows).step_by(ROW_ALIGN) {
            tiles[(segment.start + before) / ROW_ALIGN] = [index as u32, (segment.rows - before).min(ROW_ALIGN) as u32];
        }
    }
    [layout.positions().to_vec(), tiles.concat(), segments.concat()]
}

/// The rows of a layout in tiles of 128, as the fewest runs of tiles that hold any row. Tiles of padding alone lie in no run: they may be
/// another pass's rows.
pub(crate) fn runs(layout: &Layout) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for segment in layout.segments().iter().filter(|segment| segment.rows > 0) {
        let end = (segment.start + segment.rows).next_multiple_of(ROW_ALIGN);
        match runs.last_mut() {
            Some(run) if run.end == segment.start => run.end = end,
            _ => runs.push(segment.start..end),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::{runs, words};
    use crate::Layout;

    #[test]
    fn tables_of_a_layout() {
        let positions: Vec<u32> = (0..300).collect();
        let layout = Layout::new([(0, &positions[..130]), (1, &positions[..0]), (2, &positions[..128]), (3, &positions[..1])], 128);
        let [_, tiles, segments] = words(&layout);
        assert_eq!(tiles, [0, 128, 0, 2, 2, 128, 3, 1]);
        assert_eq!(segments, [0, 130, 0, 0, 256, 0, 1, 0, 256, 128, 2, 0, 384, 1, 3, 0]);
        assert_eq!(runs(&layout).as_slice(), std::slice::from_ref(&(0..512)));
        let some = layout.select(|segment| segment == 0 || segment == 3);
        assert_eq!(runs(&some), [0..256, 384..512]);
        assert_eq!(words(&some)[1], [0, 128, 0, 2, 0, 0, 3, 1]);
        assert_eq!(runs(&layout.select(|_| false)), []);
    }
}
