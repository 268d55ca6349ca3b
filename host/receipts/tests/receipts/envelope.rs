//! DSSE envelopes: the encoding of the specification, one writing, one signature.
//!
//! Never compares with itself only: the signature is checked by the rule, over bytes made here.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nodus_receipts::Envelope;
use nodus_receipts::envelope::{ENVELOPE_BYTES_MAX, EnvelopeError, PAYLOAD_TYPE, pre_authentication_encoding};

use crate::support::{key, known};

/// The example of <https://github.com/secure-systems-lab/dsse/blob/master/protocol.md>.
#[test]
fn the_encoding_is_that_of_the_specification() {
    let encoded = pre_authentication_encoding("http://example.com/HelloWorld", b"hello world");
    assert_eq!(encoded, b"DSSEv1 29 http://example.com/HelloWorld 11 hello world");
    assert_eq!(pre_authentication_encoding("é", &[]), "DSSEv1 2 é 0 ".as_bytes());
}

/// The first test vector of RFC 8032, section 7.1.
#[test]
fn the_signature_is_that_of_rfc_8032() {
    let bytes = |hex: &str| -> Vec<u8> { (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect() };
    let secret = bytes("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60");
    let expected =
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b";
    let key = nodus_receipts::HostKey::from_secret(secret.as_slice().try_into().unwrap());
    assert_eq!(key.sign(b"").to_vec(), bytes(expected));
}

#[test]
fn the_same_statement_and_key_give_the_same_bytes_and_another_key_others() {
    let write = |n| Envelope::sign(b"{\"a\":1}".to_vec(), &key(n)).to_bytes().unwrap();
    assert_eq!(write(1), write(1));
    assert_ne!(write(1), write(2));
    let bytes = write(1);
    let json: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(json["payloadType"], PAYLOAD_TYPE);
    assert_eq!(STANDARD.decode(json["payload"].as_str().unwrap()).unwrap(), b"{\"a\":1}");
    assert_eq!(json["signatures"][0]["keyid"], key(1).public().id().to_string());
    let signature: [u8; 64] = STANDARD.decode(json["signatures"][0]["sig"].as_str().unwrap()).unwrap().try_into().unwrap();
    assert!(key(1).public().has_signed(b"DSSEv1 28 application/vnd.in-toto+json 7 {\"a\":1}", &signature));
}

#[test]
fn what_is_written_is_read_and_verifies_with_its_key_only() {
    let envelope = Envelope::sign(b"payload".to_vec(), &key(1));
    let read = Envelope::parse(&envelope.to_bytes().unwrap()).unwrap();
    assert_eq!(read, envelope);
    assert_eq!(read.payload(), b"payload");
    assert_eq!(read.verify(&known(&[&key(2), &key(1)])).unwrap().id(), key(1).public().id());
    assert!(matches!(read.verify(&known(&[&key(2)])), Err(EnvelopeError::UnknownKey { .. })));
    let none = read.verify(&known(&[])).unwrap_err();
    assert!(none.to_string().ends_with("known are: none"), "{none}");
}

/// The envelope of another key's signature, said to be of a known key.
#[test]
fn a_signature_under_another_keys_name_is_refused() {
    let text = String::from_utf8(Envelope::sign(b"payload".to_vec(), &key(2)).to_bytes().unwrap()).unwrap();
    let forged = text.replace(&key(2).public().id().to_string(), &key(1).public().id().to_string());
    let error = Envelope::parse(forged.as_bytes()).unwrap().verify(&known(&[&key(1), &key(2)])).unwrap_err();
    assert!(matches!(error, EnvelopeError::BadSignature(id) if id == key(1).public().id()), "{error}");
}

#[test]
fn other_forms_are_refused() {
    let text = String::from_utf8(Envelope::sign(b"payload!".to_vec(), &key(1)).to_bytes().unwrap()).unwrap();
    let signature = text.split_once("\"signatures\":[").unwrap().1.trim_end().trim_end_matches("]}").to_owned();
    let refuse = |changed: String| {
        assert_ne!(changed, text);
        Envelope::parse(changed.as_bytes()).unwrap_err()
    };
    assert!(matches!(refuse(text.replace("{\"payloadType", "{\"extra\":1,\"payloadType")), EnvelopeError::Json(_)));
    assert!(matches!(refuse(text.replace("\"keyid\":", "\"cert\":\"\",\"keyid\":")), EnvelopeError::Json(_)));
    assert!(matches!(refuse(text.replace(&signature, &format!("{signature},{signature}"))), EnvelopeError::SignatureCount(2)));
    assert!(matches!(refuse(text.replace(&signature, "")), EnvelopeError::SignatureCount(0)));
    assert!(matches!(refuse(text.replace("\"sig\":\"", "\"sig\":\"AAAA")), EnvelopeError::SignatureLength(67)));
    assert!(matches!(refuse(text.replace("\"payload\":\"", "\"payload\":\"?")), EnvelopeError::Base64 { field: "payload", .. }));
    // Padding with bits that are dropped: another text of the same payload.
    assert!(text.contains("cGF5bG9hZCE="));
    assert!(matches!(refuse(text.replace("cGF5bG9hZCE=", "cGF5bG9hZCF=")), EnvelopeError::Base64 { .. }));
    assert!(matches!(refuse(text.replace(',', ", ")), EnvelopeError::NotCanonical));
    assert!(matches!(refuse(text.trim_end().to_owned()), EnvelopeError::NotCanonical));
    assert!(matches!(refuse(format!("{text}{text}")), EnvelopeError::Json(_)));
    assert!(matches!(refuse(" ".repeat(ENVELOPE_BYTES_MAX + 1)), EnvelopeError::TooLarge { .. }));
}

#[test]
fn a_statement_that_could_not_be_read_again_is_not_written() {
    let envelope = Envelope::sign(vec![b' '; ENVELOPE_BYTES_MAX / 4 * 3], &key(1));
    assert!(matches!(envelope.to_bytes(), Err(EnvelopeError::TooLarge { .. })));
}
