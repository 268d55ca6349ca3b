//! The closed sets of words that rows and JSON are made of.
//!
//! Each has one text form, the same in SQL, JSON and messages.

/// An enum with a text form: `Display`, `FromStr`, serde and SQL agree on it.
macro_rules! words {
    ($($(#[$doc:meta])+ $name:ident { $($(#[$variant_doc:meta])+ $variant:ident = $text:literal,)+ })+) => {$(
        $(#[$doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
        pub enum $name { $($(#[$variant_doc])+ #[serde(rename = $text)] $variant,)+ }

        impl $name {
            /// Every one of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// Its text form.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl rusqlite::ToSql for $name {
            fn to_sql(&self) -> rusqlite::Result<rusqlite::types::ToSqlOutput<'_>> {
                Ok(self.as_str().into())
            }
        }

        impl rusqlite::types::FromSql for $name {
            fn column_result(value: rusqlite::types::ValueRef<'_>) -> rusqlite::types::FromSqlResult<Self> {
                let text = value.as_str()?;
                Self::ALL.iter().copied().find(|word| word.as_str() == text).ok_or(rusqlite::types::FromSqlError::InvalidType)
            }
        }
    )+};
}

words! {
    /// What a tenant brings.
    ItemKind {
        /// A WebAssembly component.
        Component = "component",
        /// A data set, JSON Lines.
        Data = "data",
        /// A PEFT folder.
        Adapter = "adapter",
    }

    /// Where a job is in its life.
    JobState {
        /// It waits.
        Queued = "queued",
        /// Somebody holds a claim on it.
        Running = "running",
        /// It did what it was to do.
        Succeeded = "succeeded",
        /// It was asked to stop, ended well, and has a receipt.
        Stopped = "stopped",
        /// Its own fault.
        Failed = "failed",
        /// It was cut off, or never started.
        Cancelled = "cancelled",
        /// Our fault, more often than it is tried again.
        Broken = "broken",
    }

    /// How a run of a job ended for good.
    Outcome {
        /// It did what it was to do.
        Succeeded = "succeeded",
        /// It was asked to stop, and ended well.
        Stopped = "stopped",
        /// Its own fault.
        Failed = "failed",
        /// It was cut off.
        Cancelled = "cancelled",
        /// Our fault, and it is not tried again.
        Broken = "broken",
    }

    /// What an event tells.
    EventKind {
        /// The job's state changed.
        State = "state",
        /// An optimiser step.
        Step = "step",
        /// An evaluation.
        Evaluation = "evaluation",
        /// A metric of the component's own.
        Metric = "metric",
        /// How far the component says it is.
        Progress = "progress",
        /// A line of the component's log.
        Log = "log",
        /// An adapter was saved.
        Artifact = "artifact",
    }

    /// How a job shares the device.
    Lane {
        /// One engine process, passes shared with others on the same trunk.
        Fused = "fused",
        /// An engine process of its own, an MPS client.
        Mps = "mps",
        /// Nobody else on the device.
        Solo = "solo",
    }

    /// Who goes first. Ordered: high before low.
    Priority {
        /// Before all of low priority.
        High = "high",
        /// After all of high priority.
        Low = "low",
    }

    /// What a job's owner asked for.
    Stop {
        /// To end soon, and well: the component is told, and what it saves is kept.
        Stop = "stop",
        /// To be cut off.
        Cancel = "cancel",
    }

    /// What a job has an input for.
    Role {
        /// What runs.
        Component = "component",
        /// What it trains on.
        Data = "data",
        /// A second data set, to evaluate on.
        HeldOut = "held_out",
        /// The adapter that it starts from.
        InitAdapter = "init_adapter",
    }
}

impl JobState {
    /// Whether nothing more will happen to it.
    #[must_use]
    pub fn is_ended(self) -> bool {
        !matches!(self, Self::Queued | Self::Running)
    }
}

impl From<Outcome> for JobState {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Succeeded => Self::Succeeded,
            Outcome::Stopped => Self::Stopped,
            Outcome::Failed => Self::Failed,
            Outcome::Cancelled => Self::Cancelled,
            Outcome::Broken => Self::Broken,
        }
    }
}

impl Outcome {
    /// Whether a job that ended so has a receipt: the others have none, and no adapter.
    #[must_use]
    pub fn has_receipt(self) -> bool {
        matches!(self, Self::Succeeded | Self::Stopped)
    }
}
