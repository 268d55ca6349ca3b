//! A receipt's envelope, its statement, and a ledger.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nodus_fuzz::folder;
use nodus_receipts::ledger::{Filter, LEDGER_FILE};
use nodus_receipts::statement::Statement;
use nodus_receipts::{Envelope, KnownKeys, Reader, verify};

fuzz_target!(|data: &[u8]| {
    if let Ok(envelope) = Envelope::parse(data) {
        let bytes = envelope.to_bytes().expect("what was read can be written");
        let again = Envelope::parse(&bytes).expect("what was written can be read");
        assert_eq!(again.payload(), envelope.payload());
        drop(Statement::parse(envelope.payload()));
        drop(serde_json::from_slice::<nodus_host::receipt::Statement>(envelope.payload()));
    }
    drop(Statement::parse(data));
    let folder = folder();
    folder.write(LEDGER_FILE, data).expect("a file");
    let reader = Reader::new(folder.try_clone().expect("the folder"));
    let read = reader.entries().expect("the file is there").take_while(Result::is_ok).count() as u64;
    if let Ok(summary) = reader.summary(&Filter::default()) {
        assert_eq!(summary.entries, read);
    }
    let report = verify(data, &KnownKeys::default(), Some(folder), Some(&reader));
    assert!(!report.is_ok(), "signed by nobody, and accepted");
});
