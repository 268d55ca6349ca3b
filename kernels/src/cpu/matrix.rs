//! Strided views of float32 matrices, their splitting into disjoint parts, and their product.
//!
//! Never hands out two views of one element while one of them may write.
#![expect(unsafe_code, reason = "the address of disjoint mutable views and of the call into the gemm crate")]

use std::marker::PhantomData;
use std::ops::Range;

/// A matrix to read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mat<'a> {
    first: *const f32,
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
    owner: PhantomData<&'a [f32]>,
}

// SAFETY: a Mat is a shared borrow of its elements, as &[f32] is, and f32 is Sync.
unsafe impl Send for Mat<'_> {}
// SAFETY: as above.
unsafe impl Sync for Mat<'_> {}

impl<'a> Mat<'a> {
    /// A row-major view of the whole slice.
    pub(super) fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        assert!(Some(data.len()) == rows.checked_mul(cols), "{} elements are no {rows} x {cols} matrix", data.len());
        Self { first: data.as_ptr(), rows, cols, row_stride: cols, col_stride: 1, owner: PhantomData }
    }

    pub(super) fn height(self) -> usize {
        self.rows
    }

    pub(super) fn width(self) -> usize {
        self.cols
    }

    /// Turned over its diagonal.
    pub(super) fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// Some of its rows.
    pub(super) fn rows(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        let offset = if range.is_empty() || self.cols == 0 { 0 } else { range.start * self.row_stride };
        // SAFETY: the assert places row `range.start` inside this matrix, so inside the borrow it was made of.
        let first = unsafe { self.first.add(offset) };
        Self { first, rows: range.len(), ..self }
    }

    /// Some of its columns.
    pub(super) fn cols(self, range: Range<usize>) -> Self {
        self.t().rows(range).t()
    }

    /// A row that lies in one piece.
    #[inline(always)]
    pub(super) fn row(self, row: usize) -> &'a [f32] {
        assert!(self.col_stride == 1 && row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the assert places the row inside this matrix; where there are no columns nothing is added.
        let first = unsafe { self.first.add(if self.cols == 0 { 0 } else { row * self.row_stride }) };
        // SAFETY: the row's elements are initialised, lie in one piece, and are borrowed for 'a without a writer.
        unsafe { std::slice::from_raw_parts(first, self.cols) }
    }
}

/// A matrix to write, each of its rows in one piece.
#[derive(Debug)]
pub(super) struct MatMut<'a> {
    first: *mut f32,
    rows: usize,
    cols: usize,
    row_stride: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: a MatMut is an exclusive borrow of its elements, as &mut [f32] is, and f32 is Send.
unsafe impl Send for MatMut<'_> {}

impl<'a> MatMut<'a> {
    /// A row-major view of the whole slice.
    pub(super) fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        assert!(Some(data.len()) == rows.checked_mul(cols), "{} elements are no {rows} x {cols} matrix", data.len());
        Self { first: data.as_mut_ptr(), rows, cols, row_stride: cols, owner: PhantomData }
    }

    pub(super) fn height(&self) -> usize {
        self.rows
    }

    /// The same, to read.
    pub(super) fn as_mat(&self) -> Mat<'_> {
        let (rows, cols, row_stride) = (self.rows, self.cols, self.row_stride);
        Mat { first: self.first, rows, cols, row_stride, col_stride: 1, owner: PhantomData }
    }

    /// The part at these rows and columns. Private: two parts may overlap, so callers see to it that they do not.
    fn part(&self, rows: Range<usize>, cols: Range<usize>) -> MatMut<'a> {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        assert!(cols.start <= cols.end && cols.end <= self.cols, "columns {cols:?} of {}", self.cols);
        let first = if rows.is_empty() || cols.is_empty() {
            self.first
        } else {
            // SAFETY: the asserts place row `rows.start`, column `cols.start` inside this matrix, so inside the borrow it was made of.
            unsafe { self.first.add(rows.start * self.row_stride + cols.start) }
        };
        MatMut { first, rows: rows.len(), cols: cols.len(), row_stride: self.row_stride, owner: PhantomData }
    }

    /// Some of its rows, borrowed.
    pub(super) fn rows(&mut self, rows: Range<usize>) -> MatMut<'_> {
        self.part(rows, 0..self.cols)
    }

    /// Some of its columns.
    pub(super) fn into_cols(self, cols: Range<usize>) -> MatMut<'a> {
        self.part(0..self.rows, cols)
    }

    /// These ascending, disjoint ranges of rows, each a matrix.
    pub(super) fn split_rows(self, ranges: &[Range<usize>]) -> Vec<MatMut<'a>> {
        assert!(ranges.windows(2).all(|w| w[0].end <= w[1].start), "row ranges overlap or descend: {ranges:?}");
        ranges.iter().map(|rows| self.part(rows.clone(), 0..self.cols)).collect()
    }

    /// Every row, each a matrix.
    pub(super) fn split_all_rows(self) -> Vec<MatMut<'a>> {
        (0..self.rows).map(|row| self.part(row..row + 1, 0..self.cols)).collect()
    }

    /// Ranges of `step` columns (the last may be narrower), each a matrix, with the range.
    pub(super) fn split_cols(self, step: usize) -> Vec<(Range<usize>, MatMut<'a>)> {
        steps(self.cols, step).map(|cols| (cols.clone(), self.part(0..self.rows, cols))).collect()
    }

    /// A row.
    #[inline(always)]
    pub(super) fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the assert places the row inside this matrix; where `cols` is 0 the offset is at most one past the borrow's elements.
        let first = unsafe { self.first.add(if self.cols == 0 { 0 } else { row * self.row_stride }) };
        // SAFETY: the row's elements are initialised, lie in one piece, and are borrowed by this matrix alone, here for as long as self is.
        unsafe { std::slice::from_raw_parts_mut(first, self.cols) }
    }

    /// Sets every element.
    pub(super) fn fill(&mut self, value: f32) {
        for row in 0..self.rows {
            self.row(row).fill(value);
        }
    }
}

/// `0..len` in ranges of `step`, the last perhaps shorter.
pub(super) fn steps(len: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(step).map(move |start| start..len.min(start + step))
}

/// Side of the squares that [`transpose`] moves at once.
const TILE: usize = 4;
/// Columns that [`transpose`] finishes before the next ones.
const STRIP: usize = 16;

/// What a product does to its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Write {
    /// =
    Assign,
    /// +=
    Add,
}

impl Write {
    pub(super) fn accumulate(accumulate: bool) -> Self {
        if accumulate { Self::Add } else { Self::Assign }
    }
}

/// out (=, +=) scale a b, on the calling thread. The bits are a function of the operands, their shapes and strides, and the machine.
pub(super) fn product(out: &mut MatMut<'_>, write: Write, scale: f32, a: Mat<'_>, b: Mat<'_>) {
    let fits = out.rows == a.rows && out.cols == b.cols && a.cols == b.rows;
    assert!(fits, "product: {} x {} = ({} x {}) ({} x {})", out.rows, out.cols, a.rows, a.cols, b.rows, b.cols);
    let stride = |stride: usize| stride as isize;
    // SAFETY: a `Mat` or `MatMut` upholds that every element (row, column) of its shape lies inside its borrow, at the strides passed here;
    // `out` borrows exclusively; the shapes agree by the assert above.
    unsafe {
        gemm::gemm(
            out.rows,
            out.cols,
            a.cols,
            out.first,
            1,
            stride(out.row_stride),
            write == Write::Add,
            a.first,
            stride(a.col_stride),
            stride(a.row_stride),
            b.first,
            stride(b.col_stride),
            stride(b.row_stride),
            1.0,
            scale,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// out = x^T, for x with rows in one piece.
#[inline(always)]
pub(super) fn transpose(x: Mat<'_>, out: &mut MatMut<'_>) {
    assert!(out.rows == x.cols && out.cols == x.rows, "transpose: {} x {} = ({} x {})^T", out.rows, out.cols, x.rows, x.cols);
    assert!(x.col_stride == 1, "transpose: rows in one piece were expected");
    let whole = x.rows / TILE * TILE;
    // Rows of `out` lie far apart, so some of them are finished before the next.
    for strip in steps(x.cols / TILE, STRIP / TILE) {
        for row in (0..whole).step_by(TILE) {
            let first = strip.start * TILE;
            let mut from = [0, 1, 2, 3].map(|i| x.first.wrapping_add((row + i) * x.row_stride + first).cast::<[f32; TILE]>());
            let mut to = out.first.wrapping_add(first * out.row_stride + row);
            for _ in strip.clone() {
                // SAFETY: each pointer runs over columns of `strip` in one of the rows row..row + TILE of x, whose rows are in one piece.
                let tile = from.map(|from| unsafe { from.read() });
                from = from.map(|from| from.wrapping_add(1));
                for turned in turn_tile(tile) {
                    // SAFETY: `to` runs over rows of `out` that are these columns of x, at column `row`; `out` borrows them exclusively.
                    unsafe { to.cast::<[f32; TILE]>().write(turned) };
                    to = to.wrapping_add(out.row_stride);
                }
            }
        }
    }
    for col in 0..x.cols {
        let first = if col < x.cols / TILE * TILE { whole } else { 0 };
        for (out, row) in out.row(col)[first..].iter_mut().zip(first..) {
            *out = x.row(row)[col];
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn turn_tile(tile: [[f32; TILE]; TILE]) -> [[f32; TILE]; TILE] {
    // The compiler finds no shuffles for the loop below.
    let mut rows: [std::arch::x86_64::__m128; TILE] = tile.map(bytemuck::cast);
    let [a, b, c, d] = &mut rows;
    // SAFETY: SSE is part of every x86_64.
    unsafe { std::arch::x86_64::_MM_TRANSPOSE4_PS(a, b, c, d) };
    rows.map(bytemuck::cast)
}

#[cfg(not(target_arch = "x86_64"))]
fn turn_tile(tile: [[f32; TILE]; TILE]) -> [[f32; TILE]; TILE] {
    std::array::from_fn(|i| std::array::from_fn(|j| tile[j][i]))
}

#[cfg(test)]
mod tests {
    use super::{Mat, MatMut, Write, product, transpose};

    fn numbered(rows: usize, cols: usize) -> Vec<f32> {
        (0..rows * cols).map(|i| i as f32).collect()
    }

    #[test]
    fn transposing_moves_every_element_and_no_other() {
        for (rows, cols) in [(0, 3), (3, 0), (1, 1), (3, 5), (4, 4), (16, 48), (17, 23), (48, 96), (5, 70)] {
            let x = numbered(rows, cols);
            let mut out = vec![-1.0; cols * (rows + 2)];
            transpose(Mat::new(&x, rows, cols), &mut MatMut::new(&mut out, cols, rows + 2).into_cols(1..rows + 1));
            for (col, out) in out.chunks(rows + 2).enumerate() {
                assert_eq!((out[0], out[rows + 1]), (-1.0, -1.0));
                assert!((0..rows).all(|row| out[row + 1] == x[row * cols + col]), "{rows} x {cols}");
            }
        }
    }

    #[test]
    fn products_of_parts_see_those_parts() {
        let (a, b) = (numbered(5, 7), numbered(6, 7));
        let (a, b) = (Mat::new(&a, 5, 7).rows(1..4).cols(2..6), Mat::new(&b, 6, 7).rows(3..5).cols(2..6));
        let mut out = vec![1.0; 3 * 4];
        product(&mut MatMut::new(&mut out, 3, 4).into_cols(1..3), Write::Add, 2.0, a, b.t());
        for i in 0..3 {
            let want = |j: usize| 1.0 + 2.0 * a.row(i).iter().zip(b.row(j)).map(|(a, b)| a * b).sum::<f32>();
            assert_eq!(out[i * 4..(i + 1) * 4], [1.0, want(0), want(1), 1.0]);
        }
    }

    /// Assigning does not read: what was there may be NaN.
    #[test]
    fn assigning_forgets_what_was_there() {
        for (rows, inner, cols) in [(1, 3, 4), (4, 1, 1), (3, 2, 5), (20, 30, 1), (1, 30, 20), (40, 600, 50), (3, 0, 2)] {
            let (a, b) = (numbered(rows, inner), numbered(inner, cols));
            let mut out = vec![f32::NAN; rows * cols];
            product(&mut MatMut::new(&mut out, rows, cols), Write::Assign, 1.0, Mat::new(&a, rows, inner), Mat::new(&b, inner, cols));
            assert!(out.iter().all(|x| x.is_finite()), "{rows} {inner} {cols}");
        }
    }

    #[test]
    #[should_panic(expected = "row ranges overlap")]
    fn rows_cannot_be_had_twice() {
        MatMut::new(&mut [0.0; 6], 3, 2).split_rows(&[0..2, 1..3]);
    }

    #[test]
    #[should_panic(expected = "columns 1..4 of 3")]
    fn columns_outside_cannot_be_had() {
        MatMut::new(&mut [0.0; 6], 2, 3).into_cols(1..4);
    }
}
