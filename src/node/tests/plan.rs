// SPDX-License-Identifier: Apache-2.0
//! `weft plan`: what the next full pass would write.

use tokio::sync::oneshot;
use weft_backends::diff::Op;
use weft_backends::state::ObservedValue;

use super::*;
use crate::observe::preview::PreviewOp;
use crate::observe::socket::Request;

fn plan(test: &mut TestNode) -> Result<Vec<PreviewOp>, String> {
    let (reply, mut answer) = oneshot::channel();
    test.node.answer(Request::Plan(reply));
    answer.try_recv().unwrap().map_err(|error| error.to_string())
}

#[tokio::test]
async fn the_plan_is_what_the_next_full_pass_writes_and_nothing_is_written() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        assert_eq!(plan(&mut test), Ok(vec![]), "after a full pass nothing is left to write");
        let missing = Key::Route("10.5.2.0/24".parse().unwrap(), 0);
        let stale = Key::Route("10.5.3.0/24".parse().unwrap(), 0);
        let seen = test.kernel.entries().get(&missing).cloned().unwrap();
        test.kernel.disturb(missing, None, false);
        test.kernel.disturb(stale, Some(seen.clone()), false);
        let before = test.kernel.entries();
        test.kernel.take_ops();
        let planned = plan(&mut test).unwrap();
        let wanted = [
            PreviewOp { op: Op::Ensure(missing, seen.value.clone()), before: None },
            PreviewOp { op: Op::Remove(stale, seen.value.clone()), before: Some(seen) },
        ];
        assert_eq!(planned, wanted);
        assert_eq!((test.kernel.take_ops(), test.kernel.entries() == before), (vec![], true));
        test.node.full_pass(Cause::Audit).await;
        let ops: Vec<Op> = planned.into_iter().map(|planned| planned.op).collect();
        assert_eq!(test.kernel.take_ops(), ops);
        assert_eq!(plan(&mut test), Ok(vec![]));
    })
    .await;
}

#[tokio::test]
async fn without_a_list_of_leases_the_plan_removes_nothing() {
    local(async {
        let mut test = TestNode::new(OnLostLease::Hold);
        test.node.full_pass(Cause::Start).await;
        let dev = Name::new("eth0").unwrap();
        let value = Value::Route(Route::Unicast { via: [192, 168, 0, 2].into(), dev, onlink: false });
        let stale = Key::Route("10.5.2.0/24".parse().unwrap(), 0);
        test.kernel.disturb(stale, Some(ObservedValue { value, protocol: PROTOCOL, mark: false }), false);
        assert_eq!(plan(&mut test), Ok(vec![]));
    })
    .await;
}

#[tokio::test]
async fn a_kernel_that_cannot_be_read_is_an_error() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.kernel.break_dumps(Some(std::io::ErrorKind::OutOfMemory));
        let error = plan(&mut test).unwrap_err();
        assert!(error.starts_with("read the kernel's tables: "), "{error}");
    })
    .await;
}
