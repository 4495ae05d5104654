// SPDX-License-Identifier: Apache-2.0
//! The steps of a packet, and what they show together.

use serde::Serialize;

/// What a step has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// The packet passes.
    Ok,
    /// The packet is lost here.
    Broken,
    /// It cannot be decided whether the packet passes, and it probably does.
    Unknown,
    /// It cannot be decided whether the packet passes, and it probably does not.
    Doubt,
}

/// One step of the packet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Step {
    /// The name of the step.
    pub step: String,
    /// What it has shown.
    pub state: State,
    /// What is.
    pub is: String,
    /// What should be, if it is known and differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub should_be: Option<String>,
    /// The largest packet in bytes that passes this step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Why the packet is lost, as the end of a sentence that begins with "because".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub because: Option<String>,
    /// What the operator can do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Step {
    /// A step that the packet passes.
    pub fn ok(step: &str, is: impl Into<String>) -> Step {
        Step {
            step: step.to_owned(),
            state: State::Ok,
            is: is.into(),
            should_be: None,
            mtu: None,
            because: None,
            remedy: None,
        }
    }

    /// A step about which nothing certain is known.
    pub fn unknown(step: &str, is: impl Into<String>) -> Step {
        Step { state: State::Unknown, ..Step::ok(step, is) }
    }

    /// The same step, as the place where the packet is lost.
    pub fn broken(self, because: impl Into<String>, remedy: impl Into<String>) -> Step {
        Step { state: State::Broken, because: Some(because.into()), remedy: Some(remedy.into()), ..self }
    }

    /// The same step, with what should be.
    pub fn should_be(self, text: impl Into<String>) -> Step {
        Step { should_be: Some(text.into()), ..self }
    }

    /// The same step, with the largest packet that passes it.
    pub fn mtu(self, bytes: u32) -> Step {
        Step { mtu: Some(bytes), ..self }
    }
}

/// The end of the explanation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// No step is broken.
    Works,
    /// A step is broken.
    Broken,
    /// It cannot be decided here.
    Unknown,
}

/// The explanation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// The source address.
    pub from: String,
    /// What the source address is.
    pub from_is: String,
    /// The destination address.
    pub to: String,
    /// What the destination address is.
    pub to_is: String,
    /// The steps, in the order in which the packet takes them.
    pub steps: Vec<Step>,
    /// The end.
    pub verdict: Verdict,
    /// The end as a sentence.
    pub sentence: String,
    /// What the operator can do, if the way is broken or cannot be decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Explanation {
    /// The same explanation, with a service that the packet meets first. If the service has no endpoint, the packet is lost. If it is not known where
    /// the service sends the packet, the end is open, unless the packet is lost before.
    #[must_use]
    pub fn behind(mut self, service: Step) -> Explanation {
        if service.state == State::Broken {
            let because = service.because.clone().unwrap_or_else(|| service.is.clone());
            self.verdict = Verdict::Broken;
            self.sentence = format!("broken here, because {because}");
            self.remedy.clone_from(&service.remedy);
        }
        if service.state == State::Unknown && self.verdict == Verdict::Works {
            let because = service.because.clone().unwrap_or_else(|| service.is.clone());
            self.verdict = Verdict::Unknown;
            self.sentence = format!("cannot be decided here, because {because}");
            self.remedy.clone_from(&service.remedy);
        }
        self.steps.insert(0, service);
        self
    }
}
