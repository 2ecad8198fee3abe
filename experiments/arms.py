"""Arms: an algorithm with settings, under a name that reports and fingerprints carry."""

from sdpo_core.specs import ArmSpec, GrpoSpec, SdpoSpec, TeacherSpec

ARMS: dict[str, ArmSpec] = {
    arm.name: arm
    for arm in (
        ArmSpec(
            name="grpo",
            meaning="GRPO, on-policy, advantage = score minus group mean",
            algorithm=GrpoSpec(),
        ),
        ArmSpec(
            name="sdpo-static",
            meaning="SDPO with a teacher that keeps the base weights",
            algorithm=SdpoSpec(teacher=TeacherSpec(schedule="static")),
        ),
        ArmSpec(
            name="sdpo-ema",
            meaning="SDPO with a teacher that follows the student by 5 % a step",
            algorithm=SdpoSpec(teacher=TeacherSpec(schedule="ema", rate=0.05)),
        ),
    )
}
