//! Which of cuBLASLt's tiles take least energy. A card at its bound on power is as quick as its work is frugal: what loops of moments find the quickest takes up
//! to a tenth longer in a pass. Measured in loops of a fraction of a second on an H200 at its 700 W, for some thirty products of the 0.5B, 1.1B and 8B shapes
//! (kernels/NOTES.md, version 23); other cards keep the library's order.
//!
//! Never times anything, and never looks at anything but the card, the product and the number of rows that a plan is made for.

use super::Precision;
use super::blas::{Prepared, tile};
use super::device::CudaDevice;
use super::plan::{Key, Product};

/// Tiles (outputs x rows) by the library's numbers, in order of preference.
const TILES: [(u32, Tile); 7] = [
    (24, Tile::Wide),
    (23, Tile::High),
    (201, Tile::Middle),
    (197, Tile::Middle),
    (184, Tile::Fitting),
    (165, Tile::Fitting),
    (20, Tile::Square),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tile {
    /// 256 x 128.
    Wide,
    /// 128 x 256.
    High,
    /// 176 x 128 and 168 x 128.
    Middle,
    /// 144 x 128 and 112 x 128.
    Fitting,
    /// 128 x 128.
    Square,
}

/// The compute capability of the cards that these figures are of.
const HOPPER: i32 = 9;

/// How many rounds of tiles are few, and how full they must be. The larger a tile, the fewer bytes of operands go to the multiprocessors, but the more of them
/// stand idle in a round that is not full: 4096 outputs of 14,336 inputs, 2048 rows, take 352 us by 256 x 128 and 382 by 64 x 256; 896 of 4864, of which large
/// tiles make half a round and those of 112 x 128 a whole one, 30 and 32 by 64 x 256.
const FEW: f32 = 4.0;
const FULL: f32 = 0.95;
/// The same of a long product for which no tile fits: 61 us by 128 x 128 and 67 by 256 x 64 (9728 to 896, backward). A head's gradient is long, and has as many
/// slices as fill the card. Where tiles 256 wide do not divide it, those 256 high do: 375 us by 128 x 256 for 768 rows of 151,936 columns and 896 inputs, 400 by
/// 96 x 128.
const ALMOST: f32 = 0.8;

/// The longest inner length that is short, forward: there a tile's end counts, which is quicker of smaller tiles. A head of 128,256 outputs and 4096 inputs
/// takes 1600 us by 176 x 128 for 1024 rows, 1660 by 256 x 128 and 1720 by 320 x 128.
const SHORT: usize = 4096;

/// All that a choice depends on beside the product and the card: a plan that was made by other figures is not recalled.
pub(super) fn figures() -> String {
    format!("{RULE} {TILES:?} {FEW} {FULL} {ALMOST} {SHORT}")
}

/// An algorithm's place among those that take least energy for a product, for the number of rows that it was prepared for; none where others are no worse.
pub(super) fn place(device: &CudaDevice, key: Key, prepared: &Prepared, words: [u64; 8]) -> Option<usize> {
    if device.precision != Precision::Bf16 || device.gpu.properties.capability.0 != HOPPER {
        return None;
    }
    let (number, waves) = (tile(words)?, device.blas.check(prepared, words)?.waves);
    TILES.into_iter().position(|(known, tile)| known == number && is_frugal(tile, key, waves))
}

/// The number of the next function, one more whenever it answers otherwise.
const RULE: u32 = 3;

/// Whether a tile takes little energy for a product that it fills the card with so many times.
fn is_frugal(tile: Tile, Key { product, outputs, inputs }: Key, waves: f32) -> bool {
    let (is_few, fullness) = (waves <= FEW, waves / waves.ceil());
    let (is_backward, is_head) = (product == Product::LinearBackward, product == Product::LogitsBackward);
    let is_linear = is_backward || matches!(product, Product::Linear | Product::LinearBias);
    let is_short = !is_backward && inputs <= SHORT;
    match tile {
        Tile::Wide | Tile::High if is_head && inputs.is_multiple_of(256) => waves > 1.0 && fullness >= FULL,
        Tile::Wide if is_head => false,
        Tile::High if is_head => waves > 1.0 && fullness >= ALMOST,
        Tile::Wide | Tile::High => is_linear && if is_few { fullness >= FULL } else { !is_short },
        Tile::Middle => (is_linear || product == Product::Logits) && !is_few && fullness >= FULL && is_short,
        Tile::Fitting => is_linear && waves <= 1.0 && fullness >= FULL,
        Tile::Square => is_backward && is_few && fullness >= ALMOST && outputs > SHORT,
    }
}

#[cfg(test)]
mod tests {
    use super::{Key, Product, Tile, is_frugal};

    /// Whether tiles of so many columns and rows are frugal on an H200's 132 multiprocessors.
    fn is(tile: Tile, (wide, high): (usize, usize), product: Product, (outputs, inputs): (usize, usize), rows: usize) -> bool {
        let columns = if product == Product::LinearBackward { inputs } else { outputs };
        let waves = (columns.div_ceil(wide) * rows.div_ceil(high)) as f32 / 132.0;
        is_frugal(tile, Key { product, outputs, inputs }, waves)
    }

    #[test]
    fn few_full_rounds_are_of_large_tiles() {
        let is = |shape, rows| is(Tile::Wide, (256, 128), Product::Linear, shape, rows);
        assert!(is((2048, 5632), 2048) && is((4096, 14_336), 2048) && is((6144, 4096), 2048));
        assert!(!is((2560, 2048), 2048) && !is((896, 4864), 2048), "rounds that are not full");
        assert!(!is((28_672, 4096), 2048), "many rounds of a short product");
        assert!(is((4096, 14_336), 32_768), "many of a long one");
        let head = |tile, outputs, inputs, waves| is_frugal(tile, Key { product: Product::LogitsBackward, outputs, inputs }, waves);
        let of_slices = |waves| head(Tile::High, 151_936, 896, waves);
        assert!(of_slices(16.0 * 7.0 * 3.0 / 132.0) && !of_slices(16.0 * 7.0 / 132.0), "768 rows and 128, in 16 slices");
        assert!(!head(Tile::Wide, 151_936, 896, 16.0 * 4.0 * 6.0 / 132.0), "3.5 tiles");
        assert!(head(Tile::Wide, 32_000, 2048, 1.94) && head(Tile::High, 32_000, 2048, 1.94) && !head(Tile::Wide, 32_000, 2048, 1.8));
    }

    #[test]
    fn others_are_where_large_ones_are_not() {
        assert!(is(Tile::Middle, (176, 128), Product::Linear, (28_672, 4096), 2048));
        assert!(is(Tile::Middle, (176, 128), Product::Logits, (128_256, 4096), 1024));
        assert!(!is(Tile::Middle, (176, 128), Product::Linear, (2560, 2048), 2048), "two rounds");
        assert!(!is(Tile::Middle, (176, 128), Product::Logits, (128_256, 4096), 256), "eleven rounds and a bit of one");
        assert!(!is(Tile::Fitting, (112, 128), Product::Linear, (28_672, 4096), 256), "four rounds");
        assert!(
            is(Tile::Fitting, (112, 128), Product::Linear, (896, 4864), 2048)
                && is(Tile::Fitting, (144, 128), Product::LinearBias, (1152, 896), 2048)
        );
        assert!(is(Tile::Square, (128, 128), Product::LinearBackward, (9728, 896), 2048));
        assert!(!is(Tile::Square, (128, 128), Product::LinearBackward, (896, 896), 2048), "short");
        assert!(!is_frugal(Tile::Wide, Key { product: Product::Linear, outputs: 8, inputs: 8 }, 0.0), "no tiles");
    }
}
