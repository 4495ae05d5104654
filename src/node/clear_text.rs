// SPDX-License-Identifier: Apache-2.0
//! The end of clear text after net-conf has changed the backend to one that encrypts (docs/adr/020-live-change.md).

use std::time::Duration;

use tokio::time::Instant;
use weft_subnet::outside::wall_clock;
use weft_subnet::saved_peers::ClearText;

use super::Node;
use crate::kernel::Kernel;
use crate::plan::FirstLeases;

/// Packets to peers that have not followed may go out in clear text for this many grace times (`--change-grace`), so for ten minutes by
/// default. The reasons are in docs/adr/020-live-change.md.
const CLEAR_TEXT_GRACES: u32 = 10;

/// Since when our lease names a backend that encrypts, while an earlier one that does not is still in use.
#[derive(Debug, Clone, Copy)]
pub(super) struct ClearTextTime {
    /// When our lease changed, or when the agent was started if that was later.
    since: Instant,
    /// The time from the change to the start of the agent.
    before: Duration,
}

impl ClearTextTime {
    /// Begins the time now.
    pub(super) fn begin(now: Instant) -> ClearTextTime {
        ClearTextTime { since: now, before: Duration::ZERO }
    }

    /// Continues the time that an earlier run has saved. The clock of the machine may be wrong, and so may the file. A change in the future
    /// counts as one that happens now.
    pub(super) fn resume(saved: &ClearText, now: Instant) -> ClearTextTime {
        ClearTextTime { since: now, before: wall_clock().saturating_sub(Duration::from_secs(saved.since)) }
    }

    /// Returns when our lease changed, in seconds since 1970.
    fn wall(self, now: Instant) -> u64 {
        wall_clock().saturating_sub(now - self.since).saturating_sub(self.before).as_secs()
    }
}

impl<K: Kernel> Node<K> {
    /// Begins the time of clear text, or ends it, because our lease names another backend than this one since this moment. Another option of a
    /// backend that encrypts does not begin the time again, and neither does a change that an earlier run had begun.
    pub(super) fn clear_text_after_change(&mut self, before: &str, now: Instant) {
        let is_option = before == self.plan.net_conf().backend_type;
        let resumed = self.change.resumed.take().map(|(_, time)| time);
        let begun = self.change.clear_text.take().filter(|_| is_option).or(resumed);
        self.change.clear_text = self.plan.has_clear_text().then(|| begun.unwrap_or_else(|| ClearTextTime::begin(now)));
    }

    /// Returns when packets must not go out in clear text any more. Returns `None` if they may for ever, or if no earlier backend is in use.
    /// Net-conf may forbid at any time what it allowed until then. Then no beginning is known, and the end is `now`.
    pub(super) fn clear_text_end(&self, now: Instant) -> Option<Instant> {
        if !self.plan.has_clear_text() {
            return None;
        }
        let limit = self.context.options.change_grace * CLEAR_TEXT_GRACES;
        Some(self.change.clear_text.map_or(now, |time| time.since + limit.saturating_sub(time.before)))
    }

    /// Removes the earlier backends that do not encrypt, if their time is over.
    pub(super) fn end_clear_text(&mut self, now: Instant) {
        if self.clear_text_end(now).is_none_or(|end| now < end) {
            return;
        }
        self.change.clear_text = None;
        self.plan.end_clear_text();
        let peers = self.plan.refused_clear_text(0).count;
        let backend = &self.plan.net_conf().backend_type;
        tracing::warn!(backend, peers, "the time for clear text is over: nodes that have not followed are set aside");
        self.update_own_lease();
        self.save_later();
        self.schedule.audit_by(now, "the time for clear text is over");
    }

    /// Returns what is saved, so that a restart does not begin the time again.
    pub(super) fn saved_clear_text(&self, now: Instant) -> Option<ClearText> {
        let time = self.change.clear_text.filter(|_| self.plan.has_clear_text())?;
        let leases = self.plan.waiting_in_clear_text().map(ToString::to_string).collect();
        // Their nodes may not know our key yet.
        let followed = self.plan.followed_in_clear_text().map(ToString::to_string).collect();
        Some(ClearText { since: time.wall(now), leases, followed })
    }

    /// Returns what a problem says about an earlier backend that nodes still need, if packets to them go out in clear text.
    pub(super) fn clear_text_remark(&self, is_refused: bool) -> String {
        let now = Instant::now();
        let Some(end) = self.clear_text_end(now).filter(|_| is_refused) else { return String::new() };
        let minutes = end.saturating_duration_since(now).as_secs().div_ceil(60);
        format!(". Packets to them are NOT ENCRYPTED, and they are set aside in {minutes} min")
    }

    /// Names the nodes that are not reached because packets to them would not be encrypted.
    pub(super) fn refused_warning(&self) -> Option<String> {
        let refused = self.plan.refused_clear_text(FirstLeases::NAMED);
        let count = refused.count;
        let now = &self.plan.net_conf().backend_type;
        (count > 0).then(|| {
            format!(
                "{count} nodes are set aside, because their leases do not name {now} and packets to them would not be encrypted: \
                 {refused}. Replace flannel there by weft, or restart it and delete its earlier device (ip link del), or look why weft there \
                 does not follow net-conf; or set Backend.AllowPlaintext in net-conf for the time of a migration"
            )
        })
    }
}
