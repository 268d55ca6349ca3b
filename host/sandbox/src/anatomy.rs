//! Counts the parts of a component before anything is compiled: what is cheap to write may be dear to check.
//!
//! Validates nothing; the compiler does.

use wasmparser::{Parser, Payload};

use crate::failure::one_line;
use crate::limits::{LimitName, Limits};
use crate::refusal::ComponentRefusal as Refusal;

/// Parts of a component and of everything nested in it.
#[derive(Debug, Default)]
struct Parts {
    imports: u64,
    types: u64,
    functions: u64,
}

/// Whether a component has no more parts than it may have.
pub(crate) fn check(bytes: &[u8], limits: &Limits) -> Result<(), Refusal> {
    let parts = count(bytes)?;
    let checks: [(LimitName, u64, u64); 3] = [
        ("component-imports", parts.imports, limits.component_imports),
        ("component-types", parts.types, limits.component_types),
        ("component-functions", parts.functions, limits.component_functions),
    ];
    match checks.into_iter().find(|(_, found, allowed)| found > allowed) {
        Some((limit, found, allowed)) => Err(Refusal::TooManyParts { limit, found, allowed }),
        None => Ok(()),
    }
}

/// Takes each section's word for its length: what is not there, the compiler refuses.
fn count(bytes: &[u8]) -> Result<Parts, Refusal> {
    let mut parts = Parts::default();
    for payload in Parser::new(0).parse_all(bytes) {
        match payload.map_err(|error| Refusal::Invalid { reason: one_line(&error.to_string()) })? {
            Payload::ImportSection(section) => parts.imports += u64::from(section.count()),
            Payload::ComponentImportSection(section) => parts.imports += u64::from(section.count()),
            Payload::TypeSection(section) => parts.types += u64::from(section.count()),
            Payload::CoreTypeSection(section) => parts.types += u64::from(section.count()),
            Payload::ComponentTypeSection(section) => parts.types += u64::from(section.count()),
            Payload::FunctionSection(section) => parts.functions += u64::from(section.count()),
            _ => {}
        }
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_counted_however_deep_they_are() {
        let module = "(core module (type (func)) (import \"a\" \"b\" (func (type 0))) (func (type 0)) (func (type 0)))";
        let bytes = wat::parse_str(format!("(component {module} (component {module} (type (list u8)) (import \"x\" (func))))")).unwrap();
        let parts = count(&bytes).unwrap();
        assert_eq!((parts.imports, parts.functions), (3, 4));
        assert!(parts.types >= 3, "{parts:?}");
        let check = |change: fn(&mut Limits)| {
            let mut limits = Limits::DEFAULT;
            change(&mut limits);
            check(&bytes, &limits)
        };
        assert_eq!(check(|_| {}), Ok(()));
        let functions = check(|limits| limits.component_functions = 3);
        assert_eq!(functions, Err(Refusal::TooManyParts { limit: "component-functions", found: 4, allowed: 3 }));
        assert!(matches!(check(|limits| limits.component_imports = 2), Err(Refusal::TooManyParts { limit: "component-imports", .. })));
        assert!(matches!(check(|limits| limits.component_types = 2), Err(Refusal::TooManyParts { limit: "component-types", .. })));
    }

    #[test]
    fn what_is_cut_off_is_refused() {
        let bytes = wat::parse_str("(component (core module (func)))").unwrap();
        for length in 8..bytes.len() {
            let cut = &bytes[..length];
            assert!(matches!(check(cut, &Limits::DEFAULT), Ok(()) | Err(Refusal::Invalid { .. })), "{length}");
        }
    }
}
