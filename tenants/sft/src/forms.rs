//! The parameters that are words, lists or objects.
//!
//! Never checks names or layers against a trunk: `params` does.

use std::fmt;

use nodus_guest::LayerSelection;
use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Unexpected, Visitor};

/// How the learning rate goes on after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Decay {
    Constant,
    Linear,
    Cosine,
}

/// Which modules carry the adapter.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Targets {
    AllLinear,
    Names(Vec<String>),
}

/// Which layers carry the adapter.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Layers(pub(crate) LayerSelection);

impl<'de> Deserialize<'de> for Targets {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form;

        impl<'de> Visitor<'de> for Form {
            type Value = Targets;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of module names such as [\"q_proj\", \"v_proj\"], or \"all-linear\"")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Targets, E> {
                if text == "all-linear" { Ok(Targets::AllLinear) } else { Err(E::invalid_value(Unexpected::Str(text), &self)) }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Targets, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(list)).map(Targets::Names)
            }
        }

        deserializer.deserialize_any(Form)
    }
}

impl<'de> Deserialize<'de> for Layers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Top {
            last: u32,
        }

        struct Form;

        impl<'de> Visitor<'de> for Form {
            type Value = Layers;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"all\", {\"last\": 2}, or a list of layers such as [0, 1]")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Layers, E> {
                if text == "all" { Ok(Layers(LayerSelection::All)) } else { Err(E::invalid_value(Unexpected::Str(text), &self)) }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Layers, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(list)).map(|list| Layers(LayerSelection::Only(list)))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Layers, A::Error> {
                Top::deserialize(MapAccessDeserializer::new(map)).map(|top| Layers(LayerSelection::Last(top.last)))
            }
        }

        deserializer.deserialize_any(Form)
    }
}
