//! The device that a run will use, chosen before anything starts.
//!
//! Never falls back from what was asked for by name: `auto` alone may end on the CPU.

use std::collections::BTreeMap;

use anyhow::Context as _;
use cap_std::fs::Dir;
use nodus_kernels::cuda::{Card, CudaDevice, CudaOptions, Precision, free_bytes};
use nodus_kernels::{DType, DeviceError};

use super::inputs::OpenModel;
use crate::app::Surroundings;
use crate::cli::{DeviceChoice, Dtype};
use crate::cuda::{self, KernelCache};
use crate::error::user;
use crate::store::Store;

/// What the card's context, libraries and workspaces take of its memory.
const CARD_RESERVE_BYTES: u64 = 1 << 30;

/// A device to compute on.
#[derive(Debug)]
pub(crate) enum Chosen {
    /// The CPU, in float32.
    Cpu,
    /// A card.
    Cuda(ChosenCard),
}

/// A card to compute on, and in what.
#[derive(Debug)]
pub(crate) struct ChosenCard {
    card: Card,
    /// Its number for people: where the process is shown fewer cards than there are, another than the driver's.
    number: usize,
    dtype: Dtype,
    folders: Vec<String>,
    kernels: Dir,
    /// The driver's version, where the system tells it.
    driver: Option<String>,
}

/// Chooses a device for jobs on these models.
///
/// # Errors
/// The user's: what was asked for is not there or cannot do it. Ours: the data folder.
pub(crate) fn choose<'a>(
    store: &Store,
    surroundings: &Surroundings,
    (device, dtype): (Option<DeviceChoice>, Option<Dtype>),
    models: impl Iterator<Item = &'a OpenModel>,
) -> anyhow::Result<Chosen> {
    let folders = cuda::folders(surroundings.paths, &surroundings.devices);
    let card = match asked(device, surroundings)? {
        DeviceChoice::Cpu => None,
        DeviceChoice::Cuda(ordinal) => {
            let refuse = |why| user(format!("--device cuda:{ordinal} cannot be used: {why}\n`nodus-host doctor` says what is there"));
            Some(cuda::card(ordinal, &folders).map_err(refuse)?)
        }
        DeviceChoice::Auto => cuda::card(0, &folders).inspect_err(|why| tracing::info!(why, "no card is used")).ok(),
    };
    let Some(card) = card else {
        return match dtype {
            None | Some(Dtype::F32) => Ok(Chosen::Cpu),
            Some(Dtype::Bf16) => Err(user("--dtype is bf16, expected f32 or nothing: the CPU computes in float32 alone")),
        };
    };
    let dtype = match dtype {
        Some(dtype) => dtype,
        None => stored(models)?,
    };
    let (kernels, driver) = (store.kernels()?, cuda::driver_version(surroundings.paths));
    Ok(Chosen::Cuda(ChosenCard { number: card.ordinal, card, dtype, folders, kernels, driver }))
}

/// `--device`, else `NODUS_DEVICE`, else `auto`.
///
/// # Errors
/// The user's: the variable names no device.
pub(crate) fn asked(device: Option<DeviceChoice>, surroundings: &Surroundings) -> anyhow::Result<DeviceChoice> {
    match (device, &surroundings.devices.device) {
        (Some(device), _) => Ok(device),
        (None, Some(text)) => text.parse().map_err(|error| user(format!("NODUS_DEVICE: {error}"))),
        (None, None) => Ok(DeviceChoice::Auto),
    }
}

/// The type that models are stored in, as transformers loads them; their weights are shared by all jobs, so that there can be one type only.
fn stored<'a>(models: impl Iterator<Item = &'a OpenModel>) -> anyhow::Result<Dtype> {
    let dtype = |model: &OpenModel| match model.weights.dtype() {
        DType::F32 => Dtype::F32,
        DType::F16 | DType::BF16 => Dtype::Bf16,
    };
    let found: BTreeMap<String, Dtype> = models.map(|model| (model.name.to_string(), dtype(model))).collect();
    let (first_name, first) = found.first_key_value().context("a run has at least one job")?;
    match found.iter().find(|(_, dtype)| *dtype != first) {
        None => Ok(*first),
        Some((name, dtype)) => Err(user(format!(
            "model `{first_name}` is stored in {first}, model `{name}` in {dtype}: jobs of one run compute in one type; give --dtype"
        ))),
    }
}

impl Chosen {
    /// The same device, by the number that people know it by, where they know it by one.
    pub(crate) fn known_as(mut self, device: Option<DeviceChoice>) -> Self {
        if let (Self::Cuda(chosen), Some(DeviceChoice::Cuda(number))) = (&mut self, device) {
            chosen.number = number;
        }
        self
    }

    /// As people call it.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Cpu => "cpu, f32".to_owned(),
            Self::Cuda(chosen) => format!("cuda:{} ({}), {}", chosen.number, chosen.card.name, chosen.dtype),
        }
    }

    /// What it computes in.
    pub(crate) fn dtype(&self) -> Dtype {
        match self {
            Self::Cpu => Dtype::F32,
            Self::Cuda(chosen) => chosen.dtype,
        }
    }

    /// The card, where it is one.
    pub(crate) fn card(&self) -> Option<&Card> {
        match self {
            Self::Cpu => None,
            Self::Cuda(chosen) => Some(&chosen.card),
        }
    }

    /// Bytes of a weight.
    pub(super) fn weight_bytes(&self) -> u64 {
        match self {
            Self::Cuda(chosen) if chosen.dtype == Dtype::Bf16 => 2,
            _ => 4,
        }
    }
}

/// Free bytes of a card's memory, less what the driver and the libraries will take.
///
/// # Errors
/// What the driver says.
pub(crate) fn free_card_bytes(ordinal: usize) -> Result<u64, DeviceError> {
    free_bytes(ordinal).map(|bytes| bytes.saturating_sub(CARD_RESERVE_BYTES))
}

impl ChosenCard {
    /// Opens it; all buffers together, but for the weights, get so many bytes.
    ///
    /// # Errors
    /// Ours: it fails.
    pub(super) fn open(&self, buffer_bytes_max: u64) -> anyhow::Result<CudaDevice> {
        let options = CudaOptions {
            library_folders: self.folders.clone(),
            cache: Some(Box::new(KernelCache(self.kernels.try_clone().context("opening the kernels' folder")?))),
            buffer_bytes_max: Some(buffer_bytes_max),
            ..CudaOptions::default()
        };
        let precision: Precision = self.dtype.precision();
        CudaDevice::open(self.card.ordinal, precision, options).with_context(|| format!("opening cuda:{}", self.number))
    }

    /// Free bytes of its memory, less what the driver and the libraries will take.
    ///
    /// # Errors
    /// What the driver says.
    pub(super) fn free_bytes(&self) -> Result<u64, DeviceError> {
        free_card_bytes(self.card.ordinal)
    }

    /// What the system adds to what the device says of its class.
    pub(super) fn driver(&self) -> Option<(String, String)> {
        self.driver.clone().map(|version| ("nvidia-driver".to_owned(), version))
    }
}

#[cfg(test)]
mod tests {
    use nodus_kernels::cuda::Card;

    use super::{Chosen, ChosenCard, DeviceChoice, Dtype, choose};
    use crate::app::Surroundings;
    use crate::cuda::DeviceEnv;
    use crate::error::exit_code;
    use crate::paths::Paths;
    use crate::store::Store;

    fn chosen(device: Option<DeviceChoice>, dtype: Option<Dtype>, env: Option<&str>) -> anyhow::Result<Chosen> {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let store = Store::open(root.try_clone().unwrap()).unwrap();
        let devices = DeviceEnv { device: env.map(str::to_owned), ..DeviceEnv::default() };
        let paths = Paths::new(cap_std::ambient_authority());
        let surroundings =
            Surroundings { paths, data_dir: None, is_terminal: false, devices, service: crate::client::ServiceEnv::default() };
        choose(&store, &surroundings, (device, dtype), std::iter::empty())
    }

    /// An engine process sees its card as the first; places, logs and metrics name it as the operator does.
    #[test]
    fn a_card_that_is_seen_alone_keeps_its_number_for_people() {
        let kernels = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap().into_dir().unwrap();
        let card = Card { ordinal: 0, name: "NVIDIA H200".into(), capability: (9, 0), multiprocessors: 132, uuid: [0; 16] };
        let chosen = Chosen::Cuda(ChosenCard { number: 0, card, dtype: Dtype::Bf16, folders: Vec::new(), kernels, driver: None });
        let chosen = chosen.known_as(Some(DeviceChoice::Cuda(1)));
        assert_eq!((chosen.name().as_str(), chosen.card().map(|card| card.ordinal)), ("cuda:1 (NVIDIA H200), bf16", Some(0)));
        assert_eq!(Chosen::Cpu.known_as(Some(DeviceChoice::Cuda(1))).name(), "cpu, f32");
    }

    #[test]
    fn what_was_asked_for_by_name_is_taken_or_refused() {
        assert!(matches!(chosen(Some(DeviceChoice::Cpu), None, None).unwrap(), Chosen::Cpu));
        assert!(matches!(chosen(None, Some(Dtype::F32), Some("cpu")).unwrap(), Chosen::Cpu));
        let refused = |device, dtype, env| {
            let error = chosen(device, dtype, env).unwrap_err();
            assert_eq!(exit_code(&error), 2);
            error.to_string()
        };
        assert!(refused(Some(DeviceChoice::Cpu), Some(Dtype::Bf16), None).contains("float32 alone"));
        assert!(refused(None, None, Some("tpu")).starts_with("NODUS_DEVICE: `tpu` is no device"));
        let text = refused(Some(DeviceChoice::Cuda(99)), None, Some("cpu"));
        assert!(text.starts_with("--device cuda:99 cannot be used: ") && text.contains("doctor"), "{text}");
    }
}
