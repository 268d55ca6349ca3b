//! What a job that is run again finds as it was, and what nobody else may ask for.

use nodus_state::StateError;

use crate::support::{event, fixture};

#[test]
fn what_was_told_before_is_read_again_in_order_by_who_holds_the_claim() {
    let f = fixture();
    let (a, b) = (f.tenant("a"), f.tenant("b"));
    let (job, other) = (f.job(a), f.job(b));
    let claims = f.state.claim(&[job, other], "cpu").unwrap();
    f.state.append(&claims[0], &[event(1), event(2), event(3)]).unwrap();
    f.state.append(&claims[1], &[event(1)]).unwrap();
    let again = f.state.reclaim(job, "cpu").unwrap();
    assert!(matches!(f.state.told(&claims[0], 0, 9).unwrap_err(), StateError::StaleClaim));
    assert_eq!(f.state.told(&again, 0, 9).unwrap(), [event(1), event(2), event(3)]);
    assert_eq!(f.state.told(&again, 1, 1).unwrap(), [event(2)]);
    assert!(f.state.told(&again, 3, 9).unwrap().is_empty());
}

#[test]
fn a_stop_stays_at_the_question_that_it_was_noted_at_first() {
    let f = fixture();
    let job = f.job(f.tenant("a"));
    let first = f.state.claim(&[job], "cpu").unwrap()[0];
    assert_eq!(f.state.work(job).unwrap().stop_question, None);
    f.state.note_stop(&first, 7).unwrap();
    let second = f.state.reclaim(job, "cpu").unwrap();
    assert!(matches!(f.state.note_stop(&first, 8).unwrap_err(), StateError::StaleClaim));
    f.state.note_stop(&second, 9).unwrap();
    assert_eq!(f.state.work(job).unwrap().stop_question, Some(7));
}
