//! What a user or a tenant writes about a job: parameters, settings, sweeps, limits, a manifest.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nodus_host::limits::Limit;
use nodus_host::manifest;
use nodus_host::name::Name;
use nodus_host::settings::{Setting, merge, sorted};
use nodus_host::sweep::{Sweep, name_of, points};

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    drop(manifest::parse(text));
    drop(text.parse::<Name>());
    let settings: Vec<Setting> = text.lines().filter_map(|line| line.parse().ok()).collect();
    for file in [None, Some(("params.json", text))] {
        if let Ok(merged) = merge(file, &settings) {
            // One writing for one meaning: reading back what a job is given changes nothing.
            let written = serde_json::to_string(&merged).expect("JSON");
            let again = sorted(serde_json::from_str(&written).expect("an object"));
            assert_eq!(serde_json::to_string(&again).expect("JSON"), written);
        }
    }
    let sweeps: Vec<Sweep> = text.lines().take(3).filter_map(|line| line.parse().ok()).collect();
    if let Ok(points) = points(&sweeps) {
        let names: std::collections::BTreeSet<String> = points.iter().map(name_of).collect();
        assert_eq!(names.len(), points.len(), "two members of one name");
        assert!(names.iter().all(|name| !name.contains(['/', '\\', '\0']) && name.len() <= 200), "{names:?}");
    }
    for line in text.lines() {
        drop(line.parse::<Limit>());
    }
});
