//! What the kernels must know of a layout, in device memory: positions, tiles, segments; kept for a pass.
//!
//! Never looks at whose rows they are.

use std::ops::Range;

use super::ROW_ALIGN;
use super::driver::Address;
use super::staging::Staging;
use crate::{DeviceError, Layout};

/// Where a layout's tables are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowTables {
    /// A u32 a row; `u32::MAX` for padding.
    pub(crate) positions: Address,
    /// `Tile` of common.cuh, one for 128 rows.
    pub(crate) tiles: Address,
    /// `Segment` of common.cuh.
    pub(crate) segments: Address,
}

/// The tables of the layouts of a pass.
#[derive(Debug, Default)]
pub(crate) struct TableCache {
    kept: Vec<(Layout, RowTables)>,
}

impl TableCache {
    /// Forgets them: their places are going to be used again.
    pub(crate) fn clear(&mut self) {
        self.kept.clear();
    }

    pub(crate) fn find(&self, layout: &Layout) -> Option<RowTables> {
        self.kept.iter().rev().find(|(kept, _)| kept.is_clone_of(layout)).map(|(_, tables)| *tables)
    }

    pub(crate) fn keep(&mut self, layout: &Layout, tables: RowTables) {
        self.kept.push((layout.clone(), tables));
    }
}

impl RowTables {
    pub(crate) fn new(layout: &Layout, staging: &mut Staging) -> Result<Self, DeviceError> {
        let [positions, tiles, segments] = &words(layout);
        let mut table = |words: &[u32]| staging.table(bytemuck::cast_slice(words));
        Ok(Self { positions: table(positions)?, tiles: table(tiles)?, segments: table(segments)? })
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
