// SPDX-License-Identifier: Apache-2.0
//! What requests and dumps return, and how refusals are read. The kernel is played by the test where it would not answer like this on demand.

use netlink_sys::protocols::NETLINK_USERSOCK;
use nix::sys::socket::getsockopt;

use super::*;
use crate::rt::{PLAIN, ifinfomsg};

/// A kind of message that no part of netlink has.
const KIND: u16 = 0x30;

/// Returns a socket whose requests reach the test instead of the kernel, the socket of the test, and the address for its answers.
pub(crate) fn faked() -> (Netlink, Socket, SocketAddr) {
    let mut kernel = Socket::new(NETLINK_USERSOCK).unwrap();
    let at = kernel.bind_auto().unwrap();
    let netlink = Netlink::open_on(NETLINK_USERSOCK).unwrap();
    netlink.socket.connect(&at).unwrap();
    let mut own = SocketAddr::new(0, 0);
    netlink.socket.get_address(&mut own).unwrap();
    (netlink, kernel, own)
}

fn message(kind: u16, flags: u16, seq: u32, payload: &[u8]) -> Vec<u8> {
    let mut w = Writer::default();
    w.begin(kind, flags, payload);
    w.end(seq);
    w.bytes().to_vec()
}

/// Returns the end of a dump. An error is a negative number.
fn done(seq: u32, code: i32) -> Vec<u8> {
    message(NLMSG_DONE, 0, seq, &code.to_ne_bytes())
}

/// Returns the answer to a message without content: a refusal, or an acknowledgement (0).
fn answer(seq: u32, code: i32) -> Vec<u8> {
    message(NLMSG_ERROR, 0, seq, &[&code.to_ne_bytes()[..], &[0; HEADER]].concat())
}

/// The answers to one request, which has this number.
type Round = fn(u32) -> Vec<Vec<u8>>;

/// Makes a dump whose requests are answered in this way.
fn dumped<const N: usize>(rounds: [Round; N]) -> io::Result<Vec<Vec<u8>>> {
    let (mut netlink, kernel, own) = faked();
    std::thread::spawn(move || {
        for round in rounds {
            let (request, _) = kernel.recv_from_full().unwrap();
            let seq = messages(&request).next().unwrap().seq;
            for datagram in round(seq) {
                kernel.send_to(&datagram, &own, 0).unwrap();
            }
        }
    });
    let data = netlink.dump(KIND, |w, kind, flags| w.begin(kind, flags, &[0; 4]))?;
    Ok(messages(&data).filter(|m| m.kind == KIND).map(|m| m.payload.to_vec()).collect())
}

#[test]
fn a_dump_that_changed_while_it_was_read_is_repeated_and_nothing_of_it_is_returned() {
    let got = dumped([
        |seq| vec![message(KIND, 0, seq, b"old1"), message(KIND, NLM_F_DUMP_INTR, seq, b"old2"), done(seq, 0)],
        // The rest of the first dump may arrive late.
        |seq| {
            vec![
                message(KIND, 0, seq - 1, b"late"),
                message(KIND, 0, seq, b"new1"),
                message(KIND, 0, seq, b"new2"),
                done(seq, 0),
            ]
        },
    ]);
    assert_eq!(got.unwrap(), [b"new1", b"new2"]);
    let interrupted: Round = |seq| vec![message(KIND, NLM_F_DUMP_INTR, seq, b"part"), done(seq, 0)];
    let error = dumped([interrupted; DUMP_TRIES as usize]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::Interrupted, "part of a dump is never returned");
}

#[test]
fn a_dump_that_the_kernel_refuses_or_breaks_off_is_an_error() {
    let refused = dumped([|seq| vec![answer(seq, -libc::EPERM)]]).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
    let broken_off = dumped([|seq| vec![message(KIND, 0, seq, b"part"), done(seq, -libc::ENOMEM)]]).unwrap_err();
    assert_eq!(broken_off.raw_os_error(), Some(libc::ENOMEM));
}

/// The kernel goes on with a dump that it had broken off when the next message is read.
#[test]
fn a_dump_that_an_earlier_one_hinders_is_tried_once_more() {
    let busy: Round = |seq| vec![answer(seq, -libc::EBUSY)];
    let got = dumped([busy, |seq| vec![message(KIND, 0, seq, b"full"), done(seq, 0)]]);
    assert_eq!(got.unwrap(), [b"full"]);
    assert_eq!(dumped([busy; 2]).unwrap_err().raw_os_error(), Some(libc::EBUSY));
}

/// What does not exist is empty. Every other error says nothing about what is there.
#[test]
fn only_a_dump_of_what_does_not_exist_is_empty() {
    let is_empty = |code: i32| empty_if_absent(Err(io::Error::from_raw_os_error(code))).is_ok_and(|all| all.is_empty());
    assert!([libc::ENOENT, libc::EAFNOSUPPORT, libc::EOPNOTSUPP].into_iter().all(is_empty));
    assert!(![libc::EPERM, libc::EINVAL, libc::ENOBUFS, libc::EAGAIN, libc::ENODEV].into_iter().any(is_empty));
    assert_eq!(empty_if_absent(Ok(vec![7])).unwrap(), [7]);
}

#[test]
fn replies_are_complete_if_the_last_message_was_answered() {
    let (mut netlink, kernel, own) = faked();
    let (first, last) = (netlink.next_seq(), netlink.next_seq());
    for (answers, complete, refused) in [
        (vec![answer(first, -libc::EEXIST), answer(last, 0)], true, vec![first]),
        (vec![answer(first, -libc::EEXIST), answer(last, -libc::ENOENT)], true, vec![first, last]),
        (vec![answer(first, -libc::EEXIST)], false, vec![first]),
        (vec![message(KIND, 0, last, b"data")], false, vec![]),
        (vec![], false, vec![]),
    ] {
        for answer in &answers {
            kernel.send_to(answer, &own, 0).unwrap();
        }
        let replies = netlink.exchange(&message(KIND, NLM_F_REQUEST, last, &[]), last).unwrap();
        let seqs: Vec<u32> = replies.refused.iter().map(|refusal| refusal.seq).collect();
        assert_eq!((replies.complete, seqs, replies.data), (complete, refused, answers.concat()));
    }
}

/// Returns a function that receives these datagrams and errors one after the other. After the last one, nothing comes.
fn received(queue: Vec<nix::Result<Vec<u8>>>) -> impl FnMut(&mut [u8]) -> nix::Result<usize> {
    let mut queue = queue.into_iter();
    move |buffer: &mut [u8]| {
        let datagram = queue.next().unwrap_or(Err(Errno::EAGAIN))?;
        let kept = datagram.len().min(buffer.len());
        buffer[..kept].copy_from_slice(&datagram[..kept]);
        Ok(datagram.len())
    }
}

/// What is missing in a dump would look as if it were missing in the kernel.
#[test]
fn a_dump_of_which_a_part_was_lost_is_repeated_and_one_without_an_end_is_an_error() {
    let part = || Ok(message(KIND, 0, 7, b"part"));
    let read = |queue: Vec<nix::Result<Vec<u8>>>| {
        let mut taken = 0;
        let complete = read_dump(7, &mut [0; 128], received(queue), |_| taken += 1);
        (complete.map_err(|error| error.kind()), taken)
    };
    assert_eq!(read(vec![part(), Err(Errno::EINTR), part(), Ok(done(7, 0))]), (Ok(true), 3));
    assert_eq!(read(vec![part(), Err(Errno::ENOBUFS), part(), Ok(done(7, 0))]), (Ok(false), 3));
    assert_eq!(read(vec![part(), part()]), (Err(io::ErrorKind::WouldBlock), 2), "the rest never came");
    let large = Ok(message(KIND, 0, 7, &[0; 200]));
    assert_eq!(read(vec![large, Ok(done(7, 0))]), (Err(io::ErrorKind::InvalidData), 0), "it was cut off");
}

/// The rest of a dump may never come. The agent must not wait for it forever.
#[test]
fn the_wait_for_the_rest_of_a_dump_ends() {
    let netlink = Netlink::open().unwrap();
    let limit = getsockopt(&netlink.socket, sockopt::ReceiveTimeout).unwrap();
    assert!(limit.num_seconds() > 0, "{limit:?}");
}

/// Every message of a batch may be refused. If there is no room for a refusal, it is unknown what was carried out.
#[test]
fn there_is_more_room_for_replies_than_in_other_sockets() {
    let (ours, other) = (Netlink::open().unwrap(), Socket::new(NETLINK_ROUTE).unwrap());
    let room = |socket: &Socket| getsockopt(socket, sockopt::RcvBuf).unwrap();
    assert!(room(&ours.socket) > room(&other), "{} bytes", room(&ours.socket));
}

#[test]
fn a_request_that_nobody_answers_is_not_done() {
    let (mut netlink, _kernel, _) = faked();
    let error = netlink.request(|w| w.begin(KIND, 0, &[0; 4])).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
}

/// If the kernel had no memory for one reply, it may still have some for those that follow.
#[test]
fn replies_are_not_complete_if_one_of_them_was_lost() {
    let collected = |queue: Vec<nix::Result<Vec<u8>>>| collect_replies(8, &mut [0; 128], received(queue));
    let (refused, done) = (|| Ok(answer(7, -libc::EEXIST)), || Ok(answer(8, 0)));
    for (between, complete) in [(Errno::EINTR, true), (Errno::ENOBUFS, false)] {
        let replies = collected(vec![refused(), Err(between), done()]).unwrap();
        assert_eq!((replies.complete, replies.refused.len()), (complete, 1), "{between}");
    }
    assert_eq!(collected(vec![refused(), Err(Errno::EBADF)]).unwrap_err().raw_os_error(), Some(libc::EBADF));
    let large = Ok(message(KIND, 0, 8, &[0; 200]));
    assert_eq!(collected(vec![large, done()]).unwrap_err().kind(), io::ErrorKind::InvalidData, "it was cut off");
}

/// A batch for many peers is larger than the usual buffer.
#[test]
fn the_send_buffer_grows_for_a_large_datagram() {
    let (mut netlink, kernel, _) = faked();
    // The kernel makes this its smallest size.
    setsockopt(&netlink.socket, sockopt::SndBuf, &0).unwrap();
    let seq = netlink.next_seq();
    let large = message(KIND, NLM_F_REQUEST, seq, &[7; 100_000]);
    netlink.exchange(&large, seq).unwrap();
    assert!(kernel.recv_from_full().unwrap().0 == large);
}

/// A notification with the number of a request would be taken for its reply.
#[test]
fn no_request_has_the_number_of_notifications() {
    let mut netlink = Netlink::open().unwrap();
    netlink.seq = u32::MAX;
    assert_eq!([netlink.next_seq(), netlink.next_seq()], [1, 2]);
}

/// Older kernels send the whole message back with an error, and newer ones only its header.
#[test]
fn the_explanation_of_a_refusal_is_found_in_both_forms() {
    // The message has 29 bytes, and three of padding.
    let mut sent = message(KIND, NLM_F_REQUEST, 7, &[1; 13]);
    sent[..4].copy_from_slice(&29u32.to_ne_bytes());
    let mut explanation = Writer::default();
    explanation.attr_str(NLMSGERR_ATTR_MSG, "Nexthop id does not exist");
    let text = |flags: u16, sent: &[u8]| {
        let payload = [&(-libc::EINVAL).to_ne_bytes()[..], sent, explanation.bytes()].concat();
        let refusal = refusal(&payload, flags, 7).unwrap();
        assert_eq!((refusal.seq, refusal.errno, refusal.code), (7, Errno::EINVAL, libc::EINVAL));
        refusal.text
    };
    assert_eq!(text(NLM_F_ACK_TLVS, &sent), "Nexthop id does not exist");
    assert_eq!(text(NLM_F_ACK_TLVS | NLM_F_CAPPED, &sent[..HEADER]), "Nexthop id does not exist");
    assert_eq!(text(NLM_F_CAPPED, &sent[..HEADER]), "");
    assert_eq!(refusal(&[0; 20], NLM_F_CAPPED, 7), None, "an acknowledgement");
}

/// Where the kernel refuses with one number for several reasons, only its explanation tells them apart.
#[test]
fn the_kernel_explains_a_refusal() {
    let mut netlink = Netlink::open().unwrap();
    let question = [2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    // It names no link.
    let refusal = netlink.request(|w| w.begin(libc::RTM_GETNEIGH, PLAIN, &question)).unwrap().unwrap_err();
    assert!(refusal.errno == Errno::EINVAL && !refusal.text.is_empty(), "{refusal:?}");
}

/// Returns a socket of which nobody has read the answers to a dump.
pub(crate) fn with_unread_dump() -> Netlink {
    let mut netlink = Netlink::open().unwrap();
    let mut dump = Writer::default();
    dump.begin(libc::RTM_GETLINK, NLM_F_REQUEST | NLM_F_DUMP, &ifinfomsg(0, 0, 0));
    dump.end(netlink.next_seq());
    send(netlink.socket.as_raw_fd(), dump.bytes(), MsgFlags::empty()).unwrap();
    netlink
}

/// Checks that there are answers, and that all of them are those of the last message.
fn assert_answers_of_last(netlink: &Netlink, answers: &[u8]) {
    let seqs: Vec<u32> = messages(answers).map(|message| message.seq).collect();
    assert!(!seqs.is_empty() && seqs.iter().all(|seq| *seq == netlink.last_seq()), "{seqs:?}");
}

#[test]
fn replies_that_nobody_has_read_are_not_those_of_the_next_request() {
    let mut netlink = with_unread_dump();
    // The loopback device is the first one of each network namespace.
    let reply = netlink.request(|w| w.begin(libc::RTM_GETLINK, PLAIN, &ifinfomsg(1, 0, 0))).unwrap().unwrap();
    assert_answers_of_last(&netlink, &reply);
}

/// The kernel has one dump at a time for each socket. One that failed in the middle must not make those after it fail, too.
#[test]
fn a_dump_that_was_not_read_to_its_end_does_not_hinder_the_next_one() {
    let mut netlink = with_unread_dump();
    let links = netlink.dump(libc::RTM_GETLINK, |w, kind, flags| w.begin(kind, flags, &ifinfomsg(0, 0, 0))).unwrap();
    assert_answers_of_last(&netlink, &links);
}
