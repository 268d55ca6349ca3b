//! Every operation on one sequence, in float64, as plainly as it can be written.

/// Row `r` of a matrix of this width.
pub fn row(x: &[f64], r: usize, width: usize) -> &[f64] {
    &x[r * width..(r + 1) * width]
}

pub fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

pub fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let of = |x: &[f64]| {
        let r = 1.0 / (dot(x, x) / x.len() as f64 + eps).sqrt();
        x.iter().zip(weight).map(|(x, w)| x * r * w).collect::<Vec<_>>()
    };
    x.chunks(weight.len()).flat_map(of).collect()
}

/// x W^T + bias, W is outputs x inputs.
pub fn linear(x: &[f64], inputs: usize, weight: &[f64], bias: Option<&[f64]>) -> Vec<f64> {
    let of = |x: &[f64]| weight.chunks(inputs).enumerate().map(|(o, w)| dot(x, w) + bias.map_or(0.0, |b| b[o])).collect::<Vec<_>>();
    x.chunks(inputs).flat_map(of).collect()
}

/// scale B A (x * keep)
pub fn lora(x: &[f64], inputs: usize, a: &[f64], b: &[f64], scale: f64, keep: &[f64]) -> Vec<f64> {
    let rank = a.len() / inputs;
    let x: Vec<_> = x.iter().zip(keep).map(|(x, keep)| x * keep).collect();
    linear(&linear(&x, inputs, a, None), rank, b, None).iter().map(|y| scale * y).collect()
}

/// `angles` has for each row head_dim / 2 angles.
pub fn rope(x: &[f64], heads: usize, head_dim: usize, angles: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    let half = head_dim / 2;
    let mut out = x.to_vec();
    for (r, row) in out.chunks_mut(heads * head_dim).enumerate() {
        for head in row.chunks_mut(head_dim) {
            for i in 0..half {
                let (sin, cos) = angles(r, i).sin_cos();
                (head[i], head[i + half]) = (head[i] * cos - head[i + half] * sin, head[i + half] * cos + head[i] * sin);
            }
        }
    }
    out
}

/// Sizes and positions of an attention over one sequence.
#[derive(Clone, Debug)]
pub struct Attention {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub window: Option<usize>,
    pub positions: Vec<usize>,
}

impl Attention {
    /// Output and log-sum-exp.
    pub fn run(&self, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let (d, q_width, kv_width) = (self.head_dim, self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut out = vec![0.0; q.len()];
        let mut lse = vec![0.0; self.positions.len() * self.heads];
        for (r, p) in self.positions.iter().enumerate() {
            for head in 0..self.heads {
                let kv_head = head / (self.heads / self.kv_heads);
                let q = &row(q, r, q_width)[head * d..(head + 1) * d];
                let part = |x: &'_ [f64], key: usize| row(x, key, kv_width)[kv_head * d..(kv_head + 1) * d].to_vec();
                let keys = (p + 1).saturating_sub(self.window.unwrap_or(usize::MAX))..p + 1;
                let weights: Vec<_> = keys.clone().map(|key| (dot(q, &part(k, key)) / (d as f64).sqrt()).exp()).collect();
                let total: f64 = weights.iter().sum();
                lse[r * self.heads + head] = total.ln();
                for (key, weight) in keys.zip(weights) {
                    for (i, v) in part(v, key).iter().enumerate() {
                        out[r * q_width + head * d + i] += weight / total * v;
                    }
                }
            }
        }
        (out, lse)
    }
}

pub fn swiglu(gate: &[f64], up: &[f64]) -> Vec<f64> {
    gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
}

/// Loss of each row.
pub fn losses(x: &[f64], width: usize, head: &[f64], targets: &[u32]) -> Vec<f64> {
    let logits = linear(x, width, head, None);
    let rows = logits.chunks(head.len() / width).zip(targets);
    rows.map(|(logits, target)| logits.iter().map(|x| x.exp()).sum::<f64>().ln() - logits[*target as usize]).collect()
}
